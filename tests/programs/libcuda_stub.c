/* The functions of NVIDIA's driver that Legate's wheel links: there is no driver, they say. */
int cuInit(unsigned int flags) { return 34; }
int cuGetErrorName(int code, const char **text) { *text = "no driver"; return 34; }
int cuGetErrorString(int code, const char **text) { *text = "no driver"; return 34; }
int cuMemFreeHost(void *memory) { return 34; }
int cuMemFree_v2(unsigned long long memory) { return 34; }
