/* Code, and what it says of its kernels. */
static int parse(const char *code, Library *library) {
  const Elf64_Ehdr *head = (const void *)code;
  if (memcmp(code, ELFMAG, SELFMAG)) return wrong(INVALID_IMAGE, "cuLibraryLoadData: no machine code");
  const Elf64_Shdr *all = (const void *)(code + head->e_shoff);
  const char *names = code + all[head->e_shstrndx].sh_offset;
  u64 end = head->e_shoff + head->e_shnum * sizeof *all, segments = head->e_phoff + head->e_phnum * head->e_phentsize;
  end = end > segments ? end : segments;
  for (int i = 0; i < head->e_shnum; i++)
    if (all[i].sh_type != SHT_NOBITS && all[i].sh_offset + all[i].sh_size > end) end = all[i].sh_offset + all[i].sh_size;
  for (int i = 0; i < head->e_shnum; i++) {
    const char *name = names + all[i].sh_name;
    if (strncmp(name, ".nv.info.", 9)) continue;
    Kernel *k = calloc(1, sizeof *k);
    k->magic = A_KERNEL, k->name = strdup(name + 9);
    if (!strncmp(code + end, "//PTX", 5)) k->ptx = strdup(code + end);
    const unsigned char *at = (const void *)(code + all[i].sh_offset), *last = at + all[i].sh_size;
    while (at < last) {
      u32 format = at[0], attribute = at[1], bytes = at[2] | at[3] << 8;
      at += 4;
      if (format == 4 && attribute == 0x17) { /* a parameter: which, where, how large */
        u32 words[3];
        memcpy(words, at, sizeof words);
        u32 number = words[1] & 0xffff;
        k->offsets[number] = words[1] >> 16, k->sizes[number] = words[2] >> 18;
        if ((int)number >= k->count) k->count = number + 1;
      }
      at += format == 4 ? bytes : 0;
    }
    u32 reserved = 0; /* by the system in each kernel's shared memory, from sm_90 on */
    for (int j = 0; j < head->e_shnum; j++)
      if (!strncmp(names + all[j].sh_name, ".nv.shared.", 11) && !strcmp(names + all[j].sh_name + 11, k->name)) k->shared = all[j].sh_size;
      else if (!strcmp(names + all[j].sh_name, ".nv.shared.reserved.0")) reserved = 1024;
      else if (!strcmp(names + all[j].sh_name, ".nv.info"))
        for (u64 to = 0; to < all[j].sh_size;) { /* of a symbol, registers */
          const unsigned char *one = (const void *)(code + all[j].sh_offset + to);
          u32 count;
          memcpy(&count, one + 8, sizeof count);
          if (one[1] == 0x2f && count > k->registers) k->registers = count;
          to += 4 + (one[0] == 4 ? one[2] | one[3] << 8 : 0);
        }
    k->shared = k->shared > reserved ? k->shared - reserved : 0;
    APPEND(library->kernels, library->count, k);
  }
  return OK;
}
int cuLibraryLoadData(Library **found, const char *code, void *a, void *b, u32 c, void *d, void *e, u32 f) {
  CALL;
  NEED(outside("cuLibraryLoadData"));
  Library *library = calloc(1, sizeof *library);
  NEED(parse(code, library));
  library->magic = A_LIBRARY;
  *found = library;
  counts[LIBRARIES]++;
  return OK;
}
int cuLibraryUnload(Library *library) {
  TURN;
  if (library->magic != A_LIBRARY) return wrong(INVALID_HANDLE, "cuLibraryUnload: code that was given back");
  library->magic = 0;
  counts[LIBRARIES_GIVEN]++;
  return OK;
}
int cuLibraryGetKernel(Kernel **found, Library *library, const char *name) {
  CALL;
  for (int i = 0; i < library->count; i++) if (!strcmp(library->kernels[i]->name, name)) { *found = library->kernels[i]; return OK; }
  return wrong(NOT_FOUND, "cuLibraryGetKernel: no kernel %s", name);
}
int cuKernelGetFunction(Kernel **found, Kernel *kernel) { *found = kernel; return OK; }
int cuKernelGetAttribute(int *value, int attribute, Kernel *kernel, int device) { *value = attribute ? 0 : 1024; return OK; }
/* How many parameters a kernel of a name has, and their sizes; -1 where no such code was loaded. */
int dry_parameters(Kernel *kernel, const int **sizes) { *sizes = kernel->sizes; return kernel->count; }

/* A span of an array in memory, among the words that Numba makes of it: nothing, nothing, elements, bytes of
   each, address, extents, strides. */
static void spans(const Kernel *k, void **given, Op *op) {
  u64 *words = op->words = malloc(sizeof *words * k->count);
  for (int i = 0; i < k->count; i++) { words[i] = 0; memcpy(&words[i], given[i], k->sizes[i] < 8 ? k->sizes[i] : 8); }
  for (int i = 0; i < k->count; i++) {
    if (k->sizes[i] != 8 || !in_windows(words[i])) continue;
    Span span = {words[i], 1};
    for (int rank = 4; rank > 0 && i >= 4; rank -= 3) { /* of copies and folds, and of all others */
      if (i + 2 * rank >= k->count) continue;
      u64 count = 1, bytes = words[i - 1];
      for (int d = 1; d <= rank; d++) count *= words[i + d], bytes += (words[i + d] - 1) * words[i + rank + d];
      if (count == words[i - 2]) { span.bytes = bytes; break; }
    }
    APPEND(op->spans, op->given, span);
  }
}

/* The kernels of copies and folds, which do what they do: over two arrays of four axes, to[...] of x[...]. */
#define FOLD(kind, T) \
  case kind: { T one, two; memcpy(&one, a, sizeof one); memcpy(&two, b, sizeof two); \
    T made = fold == 0 ? one + two : fold == 1 ? one * two : (fold == 2 ? one >= two : one <= two) || one != one ? one : two; \
    memcpy(a, &made, sizeof made); break; }
static void walk(Op *op) {
  static const char *names[] = {"8fold_sum", "9fold_prod", "8fold_max", "8fold_min"};
  const char *name = op->kernel->name, *type = strstr(name, "5ArrayI");
  int fold = 3, kind;
  while (fold >= 0 && !strstr(name, names[fold])) fold--;
  if (op->kernel->count != 26 || (fold < 0 && !strstr(name, "7kernels4copy"))) return;
  char *to, *x, *a, *b;
  u64 *t = op->words, *s = t + 13;
  if (reach(name, t[4], 0, -1, &to, &kind) || reach(name, s[4], 0, -1, &x, &kind)) return;
  for (u64 n = 0; n < t[2]; n++) {
    u64 rest = n, there = 0, here_ = 0;
    for (int d = 3; d >= 0; d--) { u64 at = rest % t[5 + d]; rest /= t[5 + d]; there += at * t[9 + d], here_ += at * s[9 + d]; }
    a = to + there, b = x + here_;
    if (fold < 0) { memmove(a, b, t[3]); continue; }
    switch (type[7]) {
      FOLD('f', float) FOLD('d', double) FOLD('x', int64_t) FOLD('y', uint64_t) FOLD('i', int32_t) FOLD('j', uint32_t)
      FOLD('s', int16_t) FOLD('t', uint16_t) FOLD('a', int8_t) FOLD('h', uint8_t)
      default: wrong(INVALID_VALUE, "%s: a fold of a type that is not known here", name); return;
    }
  }
}
