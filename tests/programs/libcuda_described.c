/* NVIDIA's driver for libraries that only describe and plan: a version, and no device. */
#include <string.h>
static int no_device(void) { return 100; }
int cuInit(unsigned int flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
  if (!strcmp(name, "cuDriverGetVersion")) *function = (void *)cuDriverGetVersion;
  else if (!strncmp(name, "cuGetProcAddress", 16)) *function = (void *)cuGetProcAddress_v2;
  else *function = (void *)no_device;
  if (status) *status = 0;
  return 0;
}
/* What cuDNN's libraries are linked to. */
int cuGetErrorString(int code, const char **text) { *text = "no device"; return 100; }
int cuModuleGetFunction(void) { return 100; }
int cuModuleLoadData(void) { return 100; }
int cuModuleUnload(void) { return 100; }
int cuTensorMapEncodeIm2col(void) { return 100; }
int cuTensorMapEncodeTiled(void) { return 100; }
