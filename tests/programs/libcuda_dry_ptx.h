/* PTX, executed as a GPU would: warps of 32 lanes in step, blocks one after the other.

   The code of a kernel carries its PTX behind its end (programs/cuda_executed.py), which is what NVIDIA's assembler
   made it of: shuffles, halves, fragments of tensor cores and asynchronous copies are in it as on a device,
   unlike in Numba's simulator. Lanes that branch differently are groups; the group that is furthest back goes on,
   and groups that meet are one again. Asynchronous copies are done when they are waited for.

   What is not allowed, or has no defined result, is said: accesses outside of the arrays that a launch was given,
   accesses of addresses that are no multiple of their bytes, barriers and shuffles that some lanes do not come to,
   and instructions that are not known here. Results of lanes that take no part, and shared memory that nobody
   has written, are NaN. */
#include <ctype.h>
#include <fenv.h>
#include <math.h>

enum { LANES = 32, MOST_OPERANDS = 16 };
typedef enum { U8, U16, U32, U64, S8, S16, S32, S64, F16, BF16, F32, F64, F16X2, BF16X2, PRED, NO_TYPE } Type;
static const struct { const char *name; Type type; int bytes; } TYPES[] = {
  {"u8", U8, 1}, {"u16", U16, 2}, {"u32", U32, 4}, {"u64", U64, 8}, {"s8", S8, 1}, {"s16", S16, 2}, {"s32", S32, 4}, {"s64", S64, 8},
  {"f16", F16, 2}, {"bf16", BF16, 2}, {"f32", F32, 4}, {"f64", F64, 8}, {"f16x2", F16X2, 4}, {"bf16x2", BF16X2, 4}, {"pred", PRED, 1},
  {"b8", U8, 1}, {"b16", U16, 2}, {"b32", U32, 4}, {"b64", U64, 8}};
#define OPS(X) X(abs) X(add) X(and) X(bar) X(barrier) X(bfe) X(bfi) X(bra) X(brev) X(clz) X(copysign) X(cos) X(cp) X(cvt) X(cvta) \
  X(div) X(ex2) X(exit) X(fma) X(ld) X(ldmatrix) X(lg2) X(mad) X(madc) X(max) X(min) X(mma) X(mov) X(mul) X(neg) X(not) X(or) X(popc) \
  X(prmt) X(rcp) X(rem) X(ret) X(rsqrt) X(selp) X(setp) X(shfl) X(shl) X(shr) X(sin) X(sqrt) X(st) X(sub) X(tanh) X(xor)
#define NAMED(name) O_##name,
#define TEXT(name) #name,
enum { OPS(NAMED) O_mul_hi, O_mul_wide, O_mad_wide, O_pack, O_unpack, O_commit, O_wait, O_warp, O_bar_red, O_param, O_COUNT };
static const char *OP_NAMES[] = {OPS(TEXT)};
enum { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
static const char *COMPARISONS[] = {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
enum { GENERIC, GLOBAL, SHARED, LOCAL };
#define SHARED_WINDOW (1ull << 60)
#define LOCAL_WINDOW (1ull << 61)

typedef struct {
  int op, type, from, mode, round, flags, space, count, guard, negated, x[MOST_OPERANDS], operands, to, leads;
  long offset, second; /* second: of the other address of a copy */
  const char *text;
} Instruction;
enum { FTZ = 1, SAT = 2, SPLIT = 4, TRANSPOSED = 8, CARRIES = 16, APPROX = 32, NANS = 64, ZERO_FILL = 128 };
/* Counted by kernel: blocks, warps' instructions, those of loads and stores of arrays, their sectors of 32 bytes,
   sectors that their lanes' bytes would fill, accesses of shared memory, and turns that its banks take for them. */
enum { C_BLOCKS, C_INSTRUCTIONS, C_SLOTS, C_REQUESTS, C_SECTORS, C_FILLED, C_SHARED, C_TURNS, C_SPECIAL, COUNTED };
typedef struct { char *name; int index; } Name; /* a register or a label */
typedef struct { char *name; u64 at, bytes; int space; char *contents; } Symbol;
typedef struct Code {
  Instruction *all;
  int count;
  Name *registers, *labels, *declared; /* declared: registers, or what their names begin with, before a number */
  int register_count, label_count, declared_count;
  u64 *constants; /* of the registers that are numbers: those from first_constant on */
  int *constant_registers, constant_count;
  Symbol *symbols;
  int symbol_count;
  u64 shared, local;
  char *wrong; /* why it cannot be executed */
  double counted[COUNTED];
} Code;
enum { R_NONE, R_TID, R_NTID = R_TID + 3, R_CTAID = R_NTID + 3, R_NCTAID = R_CTAID + 3, R_LANE = R_NCTAID + 3, R_CARRY, R_OWN };

static int refuse(Code *code, const char *what, const char *text) {
  if (!code->wrong) { code->wrong = malloc(strlen(what) + strlen(text) + 8); sprintf(code->wrong, "%s: %s", what, text); }
  return -1;
}
static int find(const Name *names, int count, const char *name) {
  for (int i = count; i-- > 0;) if (!strcmp(names[i].name, name)) return names[i].index;
  return -1;
}
static int register_(Code *code, const char *name) {
  static const char *special[] = {"", "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
                                  "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "carry"};
  for (int i = 1; i < R_OWN; i++) if (!strcmp(special[i], name)) return i;
  int found = find(code->registers, code->register_count, name), letters = strlen(name);
  if (found >= 0) return found;
  while (letters && isdigit(name[letters - 1])) letters--;
  for (found = 0; found < code->declared_count; found++) {
    const Name *one = &code->declared[found];
    if (one->index ? !strncmp(one->name, name, letters) && !one->name[letters] : !strcmp(one->name, name)) break;
  }
  if (found == code->declared_count) return refuse(code, "a register that is not declared", name);
  Name made = {strdup(name), R_OWN + code->register_count + code->constant_count};
  APPEND(code->registers, code->register_count, made);
  return made.index;
}
static int constant(Code *code, u64 value) {
  for (int i = 0; i < code->constant_count; i++) if (code->constants[i] == value) return code->constant_registers[i];
  int count = code->constant_count, made = R_OWN + code->register_count + count;
  APPEND(code->constants, count, value);
  APPEND(code->constant_registers, code->constant_count, made);
  return made;
}
static u64 number(const char *text, char **end) {
  if (text[0] == '0' && text[1] && strchr("fFdD", text[1])) return strtoull(text + 2, end, 16);
  return text[0] == '-' ? (u64)strtoll(text, end, 0) : strtoull(text, end, 0);
}
static int operand(Code *code, Instruction *made, char *text) {
  while (isspace(*text)) text++;
  for (char *end = text + strlen(text); end > text && isspace(end[-1]);) *--end = 0;
  if (made->operands == MOST_OPERANDS) return refuse(code, "too many operands", made->text);
  if (*text == '%') return made->x[made->operands++] = register_(code, text);
  if (isdigit(*text) || *text == '-') {
    char *end;
    u64 value = number(text, &end);
    return *end ? refuse(code, "a number that is not known", made->text) : (made->x[made->operands++] = constant(code, value));
  }
  if (*text == '_' && !text[1]) return made->x[made->operands++] = R_NONE;
  for (int i = 0; i < code->symbol_count; i++)
    if (!strcmp(code->symbols[i].name, text)) return made->x[made->operands++] = constant(code, code->symbols[i].at);
  return refuse(code, "an operand that is not known", made->text);
}
static int address(Code *code, Instruction *made, char *text) {
  char *plus = strpbrk(text, "+-");
  if (plus) { *(made->operands && made->op == O_cp ? &made->second : &made->offset) = strtol(plus + (*plus == '+'), NULL, 0); *plus = 0; }
  return operand(code, made, text);
}

/* One statement without its end, such as "@%p1 ld.global.v2.u32 {%r5, %r6}, [%rd47+8]". */
static int decode(Code *code, char *text) {
  Instruction made = {.type = NO_TYPE, .from = NO_TYPE, .text = strdup(text), .count = 1, .to = -1};
  if (*text == '@') {
    made.negated = text[1] == '!';
    char *end = text + strcspn(text, " \t"), kept = *end;
    *end = 0;
    made.guard = register_(code, text + 1 + made.negated);
    *end = kept, text = end + strspn(end, " \t");
  }
  char *rest = text + strcspn(text, " \t"), *word, *whole, parts[200];
  snprintf(parts, sizeof parts, "%.*s", (int)(rest - text), text);
  rest += strspn(rest, " \t");
  word = strtok_r(parts, ".", &whole);
  for (made.op = 0; made.op < (int)(sizeof OP_NAMES / sizeof *OP_NAMES) && strcmp(OP_NAMES[made.op], word); made.op++) {}
  if (made.op == (int)(sizeof OP_NAMES / sizeof *OP_NAMES)) return refuse(code, "an instruction that is not known", made.text);
  int types = 0, base = made.op;
  while ((word = strtok_r(NULL, ".", &whole))) {
    int known = 0;
    for (int i = 0; i < (int)(sizeof TYPES / sizeof *TYPES); i++)
      if (!strcmp(word, TYPES[i].name)) {
        if (types < 2) *(types ? &made.from : &made.type) = TYPES[i].type;
        types++, known = 1;
      }
    for (int i = 0; base == O_setp && i < (int)(sizeof COMPARISONS / sizeof *COMPARISONS); i++)
      if (!strcmp(word, COMPARISONS[i])) made.mode = i, known = 1;
    static const char *integral[] = {"rni", "rzi", "rmi", "rpi"}, *rounding[] = {"rn", "rz", "rm", "rp"}, *spaces[] = {"global", "shared", "local", "const"};
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    for (int i = 0; i < 4; i++) {
      if (!strcmp(word, integral[i])) made.mode = 1, made.round = modes[i], known = 1;
      if (!strcmp(word, rounding[i])) made.round = modes[i], known = 1;
      if (!strcmp(word, spaces[i]) && !made.space) made.space = i == 3 ? GLOBAL : GLOBAL + i, known = 1;
    }
#define SAYS(text, does) if (!strcmp(word, text)) { does; known = 1; }
    SAYS("ftz", made.flags |= FTZ) SAYS("sat", made.flags |= SAT) SAYS("approx", made.flags |= APPROX) SAYS("NaN", made.flags |= NANS)
    SAYS("trans", made.flags |= TRANSPOSED) SAYS("full", )
    SAYS("v2", made.count = 2) SAYS("v4", made.count = 4) SAYS("x1", made.count = 1) SAYS("x2", made.count = 2) SAYS("x4", made.count = 4)
    SAYS("uni", ) SAYS("sync", ) SAYS("aligned", ) SAYS("to", made.mode = 1) SAYS("cg", ) SAYS("ca", ) SAYS("nc", ) SAYS("async", ) SAYS("cs", )
    SAYS("volatile", ) SAYS("relaxed", ) SAYS("gpu", ) SAYS("cta", )
    if (base == O_mul || base == O_mad || base == O_madc) {
      SAYS("lo", ) SAYS("hi", made.op = O_mul_hi; made.mode = 1) SAYS("wide", made.op = base == O_mul ? O_mul_wide : O_mad_wide)
      if (base != O_mul) SAYS("cc", made.flags |= CARRIES)
    }
    if (base == O_shfl) { SAYS("up", made.mode = 0) SAYS("down", made.mode = 1) SAYS("bfly", made.mode = 2) SAYS("idx", made.mode = 3) }
    if (base == O_cp) { SAYS("commit_group", made.op = O_commit) SAYS("wait_group", made.op = O_wait) SAYS("wait_all", made.op = O_wait; made.mode = 1) SAYS("shared", made.space = SHARED) SAYS("global", ) }
    if (base == O_bar || base == O_barrier) { SAYS("red", made.op = O_bar_red) SAYS("or", made.mode = 0) SAYS("and", made.mode = 1) SAYS("warp", made.op = O_warp) }
    if (base == O_ld) { SAYS("param", made.op = O_param) }
    if (base == O_mma) { SAYS("m16n8k16", ) SAYS("row", ) SAYS("col", ) }
    if (base == O_ldmatrix) { SAYS("m8n8", ) }
    if (!known) return refuse(code, "a modifier that is not known", made.text);
  }
  const char *not_known = base == O_mad && made.op == O_mul_hi ? "the upper half of a sum" : NULL;
  if (base == O_mma && !strstr(text, ".f32.f16.f16.f32") && !strstr(text, ".f32.bf16.bf16.f32")) not_known = "fragments";
  if (made.op == O_param && made.count > 1) not_known = "several parameters at once";
  int nearest = base != O_cvt || made.type < F16 || made.type > BF16X2 || made.type == F32 || made.type == F64;
  if (!nearest && (made.round != FE_TONEAREST || made.flags & SAT || (made.type != F16 && made.from != F32))) not_known = "a conversion";
  if (made.type == F64 && made.flags & SAT) not_known = "saturation";
  if (not_known) return refuse(code, not_known, made.text);
  if (base == O_madc) made.op = O_madc;
  if (base == O_shfl) made.type = U32;
  if (made.op == O_bra) {
    rest[strcspn(rest, " \t")] = 0;
    made.to = find(code->labels, code->label_count, rest);
    if (made.to < 0) return refuse(code, "a label that is not there", made.text);
  } else if (*rest) {
    int depth = 0, braces[MOST_OPERANDS] = {0}, items = 0;
    for (char *at = rest, *from = rest;; at++) {
      char here = *at;
      if (here == '{') { depth++, from = at + 1; if (items < MOST_OPERANDS) braces[items] = 1; }
      else if (here == '[') from = at + 1, depth += 0;
      else if (here == ',' || here == 0 || here == '}' || here == ']' || here == '|') {
        *at = 0;
        while (isspace(*from)) from++;
        if (*from) NEED(here == ']' ? address(code, &made, from) < 0 : operand(code, &made, from) < 0);
        from = at + 1;
        if (here == '}') depth--;
        if (!depth && here != '|') items += here == ',' || here == 0;
        if (here == '|') made.flags |= SPLIT;
      }
      if (!here) break;
    }
    if (made.op == O_mov && braces[0]) made.op = O_unpack;
    else if (made.op == O_mov && braces[1]) made.op = O_pack;
  }
  if ((made.op == O_bar || made.op == O_barrier || made.op == O_bar_red) && made.operands != (made.op == O_bar_red ? 3 : 1))
    return refuse(code, "a barrier for part of a block", made.text);
  APPEND(code->all, code->count, made);
  return 0;
}

/* A declaration, such as ".shared .align 4 .b8 name[5120]" or ".global .align 4 .b8 table[8] = {1, 2}". */
static void declare(Code *code, char *text, int inside) {
  if (strstr(text, ".param") || !strncmp(text, ".reg", 4) || !strncmp(text, ".pragma", 7)) {
    for (char *name = strncmp(text, ".reg", 4) ? NULL : strchr(text, '%'); name; name = strchr(name + 1, '%')) {
      int letters = strcspn(name, ", \t<");
      Name made = {strndup(name, letters), name[letters] == '<'};
      APPEND(code->declared, code->declared_count, made);
    }
    return;
  }
  int space = strstr(text, ".shared") ? SHARED : strstr(text, ".local") ? LOCAL : strstr(text, ".global") || strstr(text, ".const") ? GLOBAL : 0;
  if (!space) return;
  u64 align = 1, bytes = 1, extent = 1;
  char *equals = strchr(text, '='), *at = strstr(text, ".align"), *name = NULL, *kind = NULL, *all;
  if (equals) *equals++ = 0;
  if (at) align = strtoull(at + 6, NULL, 10);
  for (char *word = strtok_r(text, " \t", &all); word; word = strtok_r(NULL, " \t", &all)) {
    for (int i = 0; *word == '.' && i < (int)(sizeof TYPES / sizeof *TYPES); i++) if (!strcmp(word + 1, TYPES[i].name)) bytes = TYPES[i].bytes, kind = word;
    name = word;
  }
  char *bracket = name ? strchr(name, '[') : NULL;
  if (bracket) { *bracket = 0; extent = strtoull(bracket + 1, NULL, 10); }
  if (!kind || !name) { refuse(code, "a declaration that is not known", text); return; }
  Symbol made = {strdup(name), 0, bytes * extent, space, NULL};
  if (space == GLOBAL) {
    made.contents = calloc(extent + 1, bytes);
    for (u64 i = 0; equals && i < extent; i++) {
      equals += strcspn(equals, "-0123456789}");
      if (*equals == '}' || !*equals) break;
      u64 value = number(equals, NULL);
      memcpy(made.contents + i * bytes, &value, bytes);
      equals += strcspn(equals, ",}");
    }
    made.at = (u64)made.contents;
  } else {
    u64 *size = space == SHARED ? &code->shared : &code->local;
    made.at = (*size + align - 1) / align * align, *size = made.at + made.bytes;
  }
  APPEND(code->symbols, code->symbol_count, made);
}

/* The code of a text with one kernel. Labels are found first, since branches name those ahead. */
static Code *code_of(const char *given, int parameters) {
  Code *code = calloc(1, sizeof *code);
  for (int pass = 0; pass < 2; pass++) {
    char *text = strdup(given), *at = text;
    for (char *c = text; (c = strstr(c, "//"));) while (*c && *c != '\n') *c++ = ' ';
    int body = 0, count = 0, entries = 0;
    while (*at && !code->wrong) {
      at += strspn(at, " \t\r\n");
      if (!*at) break;
      if (!strncmp(at, ".version", 8) || !strncmp(at, ".target", 7) || !strncmp(at, ".address_size", 13)) { at += strcspn(at, "\n"); continue; }
      if (*at == '{' || *at == '}') { body += *at == '{' ? 1 : -1, at++; continue; }
      char *entry = strstr(at, ".entry"), *function = strstr(at, ".func");
      char *end = at + strcspn(at, ";");
      if (!body && entry && entry < end) { /* its parameters end before its body, and name themselves when they are loaded */
        if (entries++) { refuse(code, "several kernels", ".entry"); break; }
        at = entry + strcspn(entry, "{");
        continue;
      }
      if (!body && function && function < end) { refuse(code, "functions", ".func"); break; }
      char *colon = at + strcspn(at, " \t\n;:");
      if (body && *at == '$' && *colon == ':') {
        *colon = 0;
        Name label = {strdup(at), count};
        if (!pass) APPEND(code->labels, code->label_count, label);
        at = colon + 1;
        continue;
      }
      if (!*end) break;
      *end = 0;
      for (char *c = at; *c; c++) if (*c == '\n') *c = ' ';
      if (*at == '.') { if (pass) declare(code, at, body); }
      else {
        count++;
        if (pass && !strncmp(at, "ld.param", 8)) { /* its name ends with its number */
          char *number_ = NULL;
          for (char *c = at; (c = strstr(c, "_param_")); c++) number_ = c;
          if (!number_ || atoi(number_ + 7) >= parameters) refuse(code, "a parameter that is not there", at);
          char line[300];
          snprintf(line, sizeof line, "%.*s, %d", (int)strcspn(at, ","), at, number_ ? atoi(number_ + 7) : 0);
          if (strchr(number_ ? number_ : at, '+')) refuse(code, "part of a parameter", at);
          decode(code, line);
        } else if (pass) decode(code, at);
      }
      at = end + 1;
    }
    free(text);
  }
  for (int i = 0; i < code->count; i++) {
    Instruction *one = &code->all[i];
    int meets = one->op == O_bar || one->op == O_barrier || one->op == O_bar_red || one->op == O_warp || one->op == O_shfl || one->op == O_mma || one->op == O_ldmatrix;
    if (meets) one->leads = 1;
    if (one->op == O_bra) code->all[one->to].leads = 1;
    if (i && code->all[i - 1].op == O_bra) one->leads = 1;
  }
  return code;
}

/* Execution. */
typedef struct { u64 to, from; int bytes, whole, group; } Late;
typedef struct { int pc, held; u32 mask; } Group;
typedef struct {
  u64 (*r)[LANES];
  u32 alive;
  int number, syncs;
  Group groups[LANES], parked[LANES];
  int count, parked_count, lowest, groups_late[LANES], late_count[LANES];
  Late *late[LANES];
  char *local;
} Warp;
/* Who wrote and read a byte last: in which launch, block and thread, after how many barriers of the block and
   of the warp; many: 1 several warps since a barrier, 2 several blocks, 4 several lanes since one of the warp. Kept where DRY_RACES is set, of shared memory and of small allocations. */
typedef struct { u32 launch, block; unsigned short thread, barriers, of_warp, many; } Access;
typedef struct Trace { Access wrote, read; } Trace;
typedef struct { u64 address, bytes; char *contents; Trace *traces; } Reachable;
typedef struct {
  Op *op;
  Code *code;
  Reachable *reachable;
  int count, wrong, threads, warps, any, all, barriers;
  u64 block, shared;
  char *memory, *late; /* late: bytes of shared memory that a copy is on its way to */
  Trace *traces; /* of shared memory */
  Warp *warp;
} Run;

static int stop(Run *x, int lane, const Instruction *at, const char *text, ...) {
  char what[300];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(what, sizeof what, text, arguments);
  va_end(arguments);
  if (!x->wrong) went_wrong = wrong(LAUNCH_FAILED, "%s: block %llu, thread %d: %s: %s", x->op->kernel->name, x->block,
                       x->warp->number * LANES + (lane < 0 ? 0 : lane), at->text, what);
  return x->wrong = 1;
}
static inline float f32(u64 v) { u32 bits = v; float f; memcpy(&f, &bits, 4); return f; }
static inline u64 of32(float f) { u32 bits; memcpy(&bits, &f, 4); return bits; }
static inline double f64(u64 v) { double f; memcpy(&f, &v, 8); return f; }
static inline u64 of64(double f) { u64 bits; memcpy(&bits, &f, 8); return bits; }
static inline float f16(u64 v) { unsigned short bits = v; _Float16 f; memcpy(&f, &bits, 2); return f; }
static inline u64 of16(double f) { _Float16 h = f; unsigned short bits; memcpy(&bits, &h, 2); return bits; }
static inline float bf16(u64 v) { return f32((u64)(unsigned short)v << 16); }
static inline u64 ofbf16(float f) {
  u64 bits = of32(f);
  return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline float flushed(float f) { return fabsf(f) < 0x1p-126f ? copysignf(0, f) : f; }
static float flush32(u64 v) { return flushed(f32(v)); }
static double read_real(int type, u64 v) {
  return type == F32 ? f32(v) : type == F64 ? f64(v) : type == F16 ? f16(v) : bf16(v);
}

static u32 launches;
/* Whether two accesses are in no order: nothing orders blocks of a launch, barriers order the threads of a block. */
static int unordered(const Access *before, const Access *now) {
  if (before->launch != now->launch) return 0;
  if (before->block != now->block || before->many & 2) return 1;
  if (before->barriers != now->barriers) return 0;
  if (before->many & 1 || before->thread / LANES != now->thread / LANES) return 1;
  return before->of_warp == now->of_warp && (before->thread != now->thread || before->many & 4);
}
static int trace(Run *x, Warp *w, const Instruction *at, Trace *traces, int lane, const char *there, const void *value, int bytes, const char *where) {
  Access now = {launches, x->block, w->number * LANES + lane, x->barriers, w->syncs, 0};
  for (int i = 0; i < bytes; i++) {
    Trace *one = &traces[i];
    int same = value && there[i] == ((const char *)value)[i];
    if (!same && unordered(&one->wrote, &now))
      return stop(x, lane, at, "a race with what block %u, thread %u wrote in %s", one->wrote.block, one->wrote.thread, where);
    if (value && !same && unordered(&one->read, &now))
      return stop(x, lane, at, "a race with what block %u, thread %u read in %s", one->read.block, one->read.thread, where);
    if (value) { if (!same || one->wrote.launch != now.launch) one->wrote = now; continue; }
    Access before = one->read;
    one->read = now;
    if (before.launch != now.launch) continue;
    if (before.block != now.block || before.many & 2) one->read.many |= 2;
    if (before.block != now.block || before.barriers != now.barriers) continue;
    if (before.thread / LANES != now.thread / LANES || before.many & 1) one->read.many |= 1;
    if (before.of_warp == now.of_warp && (before.thread != now.thread || before.many & 4)) one->read.many |= 4;
  }
  return 0;
}

/* Where an access of a lane is, or NULL where it may not be. value: what is written, of a write that may race. */
static char *place(Run *x, Warp *w, const Instruction *at, int space, int lane, u64 address, int bytes, const char *does, const void *value) {
  if (space == GENERIC) {
    if (address & SHARED_WINDOW) space = SHARED, address -= SHARED_WINDOW;
    else if (address & LOCAL_WINDOW) space = LOCAL, address -= LOCAL_WINDOW;
  }
  if (!(bytes & (bytes - 1)) && address % bytes) { stop(x, lane, at, "%s %d bytes at %#llx, which is no multiple", does, bytes, address); return NULL; }
  if (space == SHARED) {
    if (address < x->shared && bytes <= x->shared - address) {
      char *there = x->memory + address;
      if (x->late && at->op != O_wait && memchr(x->late + address, 1, bytes)) {
        stop(x, lane, at, "%s byte %llu of shared memory, to which a copy is on its way", does, address);
        return NULL;
      }
      return x->traces && trace(x, w, at, x->traces + address, lane, there, value, bytes, "shared memory") ? NULL : there;
    }
    stop(x, lane, at, "%s byte %llu of %llu of shared memory", does, address, x->shared);
    return NULL;
  }
  if (space == LOCAL) {
    if (address < x->code->local && bytes <= x->code->local - address) return w->local + lane * x->code->local + address;
    stop(x, lane, at, "%s byte %llu of %llu of its own memory", does, address, x->code->local);
    return NULL;
  }
  for (int i = 0; i < x->count; i++) {
    Reachable *one = &x->reachable[i];
    if (address - one->address < one->bytes && address + bytes <= one->address + one->bytes) {
      if (i) { Reachable first = x->reachable[i]; x->reachable[i] = x->reachable[0]; x->reachable[0] = first; one = x->reachable; }
      char *there = one->contents + (address - one->address);
      return one->traces && trace(x, w, at, one->traces + (address - one->address), lane, there, value, bytes, "an array") ? NULL : there;
    }
  }
  stop(x, lane, at, "%s %d bytes at %#llx, which are of no array of the launch", does, bytes, address);
  return NULL;
}

enum { NOWHERE = 1 << 30 };
static void set_lowest(Warp *w) {
  w->lowest = NOWHERE;
  for (int i = 0; i < w->count; i++) if (!w->groups[i].held && w->groups[i].pc < w->lowest) w->lowest = w->groups[i].pc;
}
/* Sectors of memory, or turns of banks of shared memory, of lanes' accesses of some bytes each. */
static int by_u64(const void *a, const void *b) { return *(const u64 *)a < *(const u64 *)b ? -1 : *(const u64 *)a > *(const u64 *)b; }
static void count_accesses(Run *x, int space, u32 m, const u64 *addresses, long offset, int bytes) {
  u64 words[LANES * 4];
  int count = 0, step = space == SHARED ? 4 : 32;
  double *to = x->code->counted;
  for (int l = 0; l < LANES; l++) if (m >> l & 1)
    for (u64 a = (addresses[l] + offset) / step; a <= (addresses[l] + offset + bytes - 1) / step; a++) words[count++] = a;
  qsort(words, count, sizeof *words, by_u64);
  int distinct = 0;
  for (int i = 0; i < count; i++) if (!i || words[i] != words[i - 1]) words[distinct++] = words[i];
  if (space != SHARED) {
    to[C_REQUESTS]++, to[C_SECTORS] += distinct, to[C_FILLED] += __builtin_popcount(m) * bytes / 32.;
    return;
  }
  int banks[32] = {0}, most = 0;
  for (int i = 0; i < distinct; i++) if (++banks[words[i] % 32] > most) most = banks[words[i] % 32];
  to[C_SHARED] += (distinct + 31) / 32, to[C_TURNS] += most;
}
/* How many slots of a scheduler an instruction takes, about: those of 64 bits are pairs, divisions routines. */
static double slots(const Instruction *at) {
  int wide = TYPES[at->type == NO_TYPE ? 0 : at->type].bytes == 8 && at->type <= S64;
  switch (at->op) {
    case O_mov: case O_cvta: case O_param: case O_pack: case O_unpack: return 0;
    case O_cvt: return at->type <= S64 && at->from <= S64 ? at->type == S64 : 1;
    case O_mul: case O_mad: return wide ? 4 : 1;
    case O_div: case O_rem: return wide ? 70 : at->type == F64 ? 30 : at->flags & APPROX ? 2 : at->type == F32 ? 10 : 18;
    case O_sqrt: case O_rcp: return at->flags & APPROX ? 1 : 8;
    case O_ld: case O_st: case O_bra: return 1;
    default: return wide || at->type == F64 ? 2 : 1;
  }
}
static int special(const Instruction *at) {
  return at->op == O_ex2 || at->op == O_lg2 || at->op == O_rsqrt || at->op == O_sin || at->op == O_cos || at->op == O_tanh || at->op == O_rcp || at->op == O_sqrt ||
         (at->op == O_div && at->type == F32);
}

static void join_groups(Warp *w, int pc, u32 mask, int held) {
  int i = 0;
  while (i < w->count && w->groups[i].pc != pc) i++;
  if (i == w->count) w->groups[w->count++] = (Group){pc, held, mask};
  else w->groups[i].mask |= mask, w->groups[i].held = 0;
  set_lowest(w);
}

static inline int bits_of(int type) { return TYPES[type].bytes * 8; }
static u64 integer(int type, u64 v) {
  switch (type) {
    case U8: return (uint8_t)v;
    case U16: return (uint16_t)v;
    case U32: return (u32)v;
    case S8: return (u64)(int8_t)v;
    case S16: return (u64)(int16_t)v;
    case S32: return (u64)(int32_t)v;
    default: return v;
  }
}
static u64 to_integer(int type, double f, int round, int wide) { /* wide: of 64 bits */
  static const double low[] = {0, 0, 0, 0, -128., -32768., -2147483648., -9223372036854775808.};
  static const double high[] = {255., 65535., 4294967295., 18446744073709551616., 127., 32767., 2147483647., 9223372036854775808.};
  if (f != f) return integer(type, wide || type == S64 || type == U64 ? 1ull << (bits_of(type) - 1) : 0);
  f = round == FE_TOWARDZERO ? trunc(f) : round == FE_DOWNWARD ? floor(f) : round == FE_UPWARD ? ceil(f) : rint(f);
  if (f <= low[type]) return (u64)(int64_t)low[type];
  if (f >= high[type]) return type == U64 ? ~0ull : type == S64 ? ~0ull >> 1 : (u64)high[type];
  return type == U64 ? (u64)f : (u64)(int64_t)f;
}
static u64 converted(const Instruction *at, u64 v, u64 second) {
  int to = at->type, from = at->from;
  if (to == F16X2) return of16(f32(v)) << 16 | of16(f32(second));
  if (to == BF16X2) return ofbf16(f32(v)) << 16 | ofbf16(f32(second));
  if (to <= S64 && from <= S64) {
    u64 i = integer(from, v), most = ~0ull >> (64 - bits_of(to) + (to >= S8));
    int below = from >= S8 && (int64_t)i < 0;
    if (!(at->flags & SAT)) return integer(to, i);
    if (below) return to < S8 ? 0 : (int64_t)i < -(int64_t)most - 1 ? integer(to, most + 1) : integer(to, i);
    return i > most ? most : integer(to, i);
  }
  if (to <= S64) {
    double f = read_real(from, v);
    return to_integer(to, at->flags & FTZ && from == F32 ? flushed(f) : f, at->round, from == F64);
  }
  if (from <= S64) {
    volatile u64 i = integer(from, v);
    if (at->round != FE_TONEAREST) fesetround(at->round);
    volatile float single = from >= S8 ? (float)(int64_t)i : (float)i;
    volatile double f = from >= S8 ? (double)(int64_t)i : (double)i;
    if (at->round != FE_TONEAREST) fesetround(FE_TONEAREST);
    if (to == F32) return of32(single);
    return to == F64 ? of64(f) : to == F16 ? of16(from >= S8 ? (float)(int64_t)i : (float)i) : ofbf16(f);
  }
  double f = read_real(from, v);
  if (at->flags & FTZ && from == F32) f = flushed(f);
  if (at->mode) f = at->round == FE_TOWARDZERO ? trunc(f) : at->round == FE_DOWNWARD ? floor(f) : at->round == FE_UPWARD ? ceil(f) : rint(f);
  if (at->flags & SAT) f = f > 0 ? f < 1 ? f : 1 : 0;
  if (to == F64) return of64(f);
  if (to == F16) return of16(f);
  if (to == BF16) return ofbf16(f);
  int directed = !at->mode && at->round != FE_TONEAREST;
  if (directed) fesetround(at->round);
  volatile float rounded = f;
  if (directed) fesetround(FE_TONEAREST);
  return of32(at->flags & FTZ ? flushed(rounded) : rounded);
}
static void land(Run *x, Warp *w, const Instruction *at, int lane, int newest) {
  static const char zeros[16]; /* what is written at first */
  int kept = 0;
  for (int i = 0; i < w->late_count[lane]; i++) {
    Late *one = &w->late[lane][i];
    if (one->group > w->groups_late[lane] - 1 - newest) { w->late[lane][kept++] = *one; continue; }
    char *to = place(x, w, at, SHARED, lane, one->to, one->whole, "copies to", zeros);
    char *from = one->bytes ? place(x, w, at, GLOBAL, lane, one->from, one->bytes, "copies", NULL) : NULL;
    if (!to || (one->bytes && !from)) return;
    memset(to, 0, one->whole), memset(x->late + one->to, 0, one->whole);
    if (one->bytes) memcpy(to, from, one->bytes);
  }
  w->late_count[lane] = kept;
}
static void multiply(Warp *w, const Instruction *at) {
  float a[16][16], b[16][8], d[16][8];
  const int *o = at->x;
  float (*real)(u64) = at->from == BF16 ? bf16 : f16;
  for (int l = 0; l < LANES; l++) {
    int g = l >> 2, t = (l & 3) * 2;
    for (int i = 0; i < 4; i++) for (int j = 0; j < 2; j++)
      a[g + 8 * (i & 1)][t + j + 8 * (i >> 1)] = real(w->r[o[4 + i]][l] >> 16 * j);
    for (int i = 0; i < 2; i++) for (int j = 0; j < 2; j++) b[t + j + 8 * i][g] = real(w->r[o[8 + i]][l] >> 16 * j);
    for (int i = 0; i < 4; i++) d[g + 8 * (i >> 1)][t + (i & 1)] = f32(w->r[o[10 + i]][l]);
  }
  for (int m = 0; m < 16; m++) for (int n = 0; n < 8; n++) {
    double sum = d[m][n];
    for (int k = 0; k < 16; k++) sum += (double)a[m][k] * b[k][n];
    d[m][n] = sum;
  }
  for (int l = 0; l < LANES; l++)
    for (int i = 0; i < 4; i++) w->r[o[i]][l] = of32(d[(l >> 2) + 8 * (i >> 1)][(l & 3) * 2 + (i & 1)]);
}
static u64 carried(const Instruction *at, u64 product, u64 c, u64 *carry) {
  u64 sum = (u64)(u32)(at->mode ? product >> 32 : product) + (u32)c + (at->op == O_madc ? *carry : 0);
  if (at->flags & CARRIES) *carry = sum >> 32;
  return (u32)sum;
}

#define EACH(...) do { if (m == ~0u) { for (int l = 0; l < LANES; l++) { __VA_ARGS__; } } \
                       else for (int l = 0; l < LANES; l++) if (m >> l & 1) { __VA_ARGS__; } } while (0)
#define CASE(op, type) case (op) << 4 | (type):
#define INT(op, T, t, expr) CASE(op, T) EACH(t a = (t)A[l]; t b = (t)B[l]; t c = (t)C[l]; (void)a, (void)b, (void)c; D[l] = (u64)(expr)); break;
#define INTS(op, expr) INT(op, U16, uint16_t, expr) INT(op, U32, u32, expr) INT(op, U64, u64, expr) \
                       INT(op, S16, int16_t, expr) INT(op, S32, int32_t, expr) INT(op, S64, int64_t, expr)
#define BITS(op, expr) INT(op, U8, uint8_t, expr) INT(op, U16, uint16_t, expr) INT(op, U32, u32, expr) INT(op, U64, u64, expr)
#define REAL32(op, expr) CASE(op, F32) { int ftz = at->flags & FTZ, sat = at->flags & SAT, nears = at->round == FE_TONEAREST; \
    if (!nears) fesetround(at->round); \
    EACH(float a = f32(A[l]); float b = f32(B[l]); float c = f32(C[l]); if (ftz) a = flushed(a), b = flushed(b), c = flushed(c); \
         float d = expr; if (ftz) d = flushed(d); if (sat) d = d > 0 ? d < 1 ? d : 1 : 0; D[l] = of32(d)); \
    if (!nears) fesetround(FE_TONEAREST); break; }
#define REAL64(op, expr) CASE(op, F64) { if (at->round != FE_TONEAREST) fesetround(at->round); \
    EACH(double a = f64(A[l]); double b = f64(B[l]); double c = f64(C[l]); (void)b, (void)c; D[l] = of64(expr)); \
    if (at->round != FE_TONEAREST) fesetround(FE_TONEAREST); break; }
#define REALS(op, e32, e64) REAL32(op, e32) REAL64(op, e64)
#define COMPARE(T, t, read) CASE(O_setp, T) EACH(t a = (t)read(A[l]); t b = (t)read(B[l]); int either = a != a || b != b; int yes; switch (at->mode) { \
    case EQ: yes = a == b; break; case NE: yes = !either && a != b; break; case LT: yes = a < b; break; case LE: yes = a <= b; break; \
    case GT: yes = a > b; break; case GE: yes = a >= b; break; case EQU: yes = either || a == b; break; case NEU: yes = either || a != b; break; \
    case LTU: yes = either || a < b; break; case LEU: yes = either || a <= b; break; case GTU: yes = either || a > b; break; \
    case GEU: yes = either || a >= b; break; case NUM: yes = !either; break; default: yes = either; } D[l] = yes; if (second) SECOND[l] = !yes); break;

/* Let the group of a warp that is furthest back go on, until it ends, parts or has to wait. */
static void go_on(Run *x, Warp *w) {
  int chosen = -1;
  for (int i = 0; i < w->count; i++) if (!w->groups[i].held && w->groups[i].pc == w->lowest) chosen = i;
  u32 mask = w->groups[chosen].mask;
  int pc = w->lowest, begun = 1;
  w->groups[chosen] = w->groups[--w->count];
  set_lowest(w);
  for (;; pc++) {
    const Instruction *at = &x->code->all[pc];
    if (at->leads && !begun && pc >= w->lowest) { join_groups(w, pc, mask, 0); return; }
    begun = 0;
    u32 m = mask;
    if (at->guard) {
      const u64 *p = w->r[at->guard];
      u32 yes = 0;
      for (int l = 0; l < LANES; l++) yes |= (u32)(p[l] & 1) << l;
      m &= at->negated ? ~yes : yes;
      if (!m) continue;
    }
    if (counting) {
      double *to = x->code->counted;
      to[C_INSTRUCTIONS]++, to[C_SLOTS] += slots(at), to[C_SPECIAL] += special(at);
      int n = at->op == O_ld ? at->count : at->op == O_ldmatrix ? at->count : 0, bytes = at->op == O_ldmatrix ? 16 : TYPES[at->type == NO_TYPE ? 0 : at->type].bytes * at->count;
      if ((at->op == O_ld || at->op == O_st) && at->space != LOCAL) count_accesses(x, at->space, m, w->r[at->x[n]], at->offset, bytes);
      else if (at->op == O_ldmatrix)
        for (int i = 0; i < at->count; i++) count_accesses(x, SHARED, 255u << 8 * i, w->r[at->x[n]], at->offset, 16);
      else if (at->op == O_cp) count_accesses(x, GLOBAL, m, w->r[at->x[1]], 0, 16);
      else if (at->op == O_shfl) to[C_SHARED]++, to[C_TURNS]++;
    }
    const int *o = at->x;
    int second = at->flags & SPLIT && at->op == O_setp ? o[1] : 0, skip = second != 0;
    u64 *D = w->r[o[0]], *A = w->r[o[1 + skip]], *B = w->r[o[2 + skip]], *C = w->r[o[3 + skip]], *SECOND = w->r[second];
    switch (at->op << 4 | at->type) {
      INTS(O_add, a + b) INTS(O_sub, a - b) INTS(O_mul, a * b) INTS(O_mul_wide, (at->type >= S8 ? (u64)((int64_t)a * (int64_t)b) : (u64)a * (u64)b))
      INTS(O_div, b ? (at->type >= S8 && b == (__typeof__(b))-1 ? -a : a / b) : (__typeof__(b))-1) INTS(O_rem, b ? (at->type >= S8 && b == (__typeof__(b))-1 ? 0 : a % b) : a)
      INTS(O_min, a < b ? a : b) INTS(O_max, a > b ? a : b) INTS(O_neg, -a) INTS(O_abs, a < 0 ? -a : a)
      INT(O_mul_hi, U32, u32, (u64)a * b >> 32) INT(O_mul_hi, S32, int32_t, (int64_t)a * b >> 32)
      INT(O_mul_hi, U64, u64, (unsigned __int128)a * b >> 64) INT(O_mul_hi, S64, int64_t, (__int128)a * b >> 64)
      CASE(O_mad, U32) CASE(O_mad, S32) CASE(O_madc, U32)
        if (at->flags & CARRIES || at->op == O_madc) EACH(D[l] = carried(at, (u64)(u32)A[l] * (u32)B[l], C[l], &w->r[R_CARRY][l]));
        else EACH(D[l] = (u32)(A[l] * B[l] + C[l]));
        break;
      INT(O_mad, U64, u64, a * b + c) INT(O_mad, S64, int64_t, a * b + c) INT(O_mad, U16, uint16_t, a * b + c) INT(O_mad, S16, int16_t, a * b + c)
      CASE(O_mad_wide, S32) EACH(D[l] = (u64)((int64_t)(int32_t)A[l] * (int32_t)B[l]) + C[l]); break;
      CASE(O_mad_wide, U32) EACH(D[l] = (u64)(u32)A[l] * (u32)B[l] + C[l]); break;
      BITS(O_and, a & b) BITS(O_or, a | b) BITS(O_xor, a ^ b) BITS(O_not, ~a)
      INT(O_and, PRED, u64, a & b) INT(O_or, PRED, u64, a | b) INT(O_xor, PRED, u64, a ^ b) INT(O_not, PRED, u64, a ^ 1)
#define SHIFT(T, t) CASE(O_shl, T) EACH(u32 n = B[l]; D[l] = n < sizeof(t) * 8 ? (u64)(t)((u64)(t)A[l] << n) : 0); break; \
                    CASE(O_shr, T) EACH(u32 n = B[l]; t a = (t)A[l]; D[l] = n < sizeof(t) * 8 ? (u64)(t)(a >> n) : (u64)(t)(a < 0 ? -1 : 0)); break;
      SHIFT(U16, uint16_t) SHIFT(U32, u32) SHIFT(U64, u64) SHIFT(S16, int16_t) SHIFT(S32, int32_t) SHIFT(S64, int64_t)
      COMPARE(U16, uint16_t, ) COMPARE(U32, u32, ) COMPARE(U64, u64, ) COMPARE(S16, int16_t, ) COMPARE(S32, int32_t, ) COMPARE(S64, int64_t, )
      COMPARE(F32, float, (at->flags & FTZ ? flush32 : f32)) COMPARE(F64, double, f64) COMPARE(F16, float, f16)
      REALS(O_add, a + b, a + b) REALS(O_sub, a - b, a - b) REALS(O_mul, a * b, a * b) REALS(O_fma, fmaf(a, b, c), fma(a, b, c)) REALS(O_neg, -a, -a) REALS(O_abs, fabsf(a), fabs(a))
      REALS(O_div, at->flags & APPROX && fabsf(b) > 0x1p126f && fabsf(b) < INFINITY ? (isinf(a) ? NAN : copysignf(0, a) * copysignf(1, b)) : a / b, a / b)
      REALS(O_sqrt, sqrtf(a), sqrt(a)) REALS(O_rcp, 1 / a, at->flags & APPROX ? f64(of64(1 / a) >> 32 << 32) : 1 / a)
      REALS(O_rsqrt, (float)(1 / sqrt((double)a)), f64(of64(1 / sqrt(a)) >> 32 << 32))
      REALS(O_copysign, copysignf(b, a), copysign(b, a))
      REALS(O_min, at->flags & NANS && (a != a || b != b) ? NAN : a == b ? (signbit(a) ? a : b) : fminf(a, b), a == b ? (signbit(a) ? a : b) : fmin(a, b))
      REALS(O_max, at->flags & NANS && (a != a || b != b) ? NAN : a == b ? (signbit(a) ? b : a) : fmaxf(a, b), a == b ? (signbit(a) ? b : a) : fmax(a, b))
      REAL32(O_ex2, exp2f(a)) REAL32(O_lg2, log2f(a)) REAL32(O_sin, sinf(a)) REAL32(O_cos, cosf(a)) REAL32(O_tanh, tanhf(a))
      BITS(O_bfe, ((B[l] & 255) < bits_of(at->type) ? (u64)a >> (B[l] & 255) : 0) & ((C[l] & 255) < bits_of(at->type) ? (1ull << (C[l] & 255)) - 1 : ~0ull))
      INT(O_popc, U32, u32, __builtin_popcount(a)) INT(O_popc, U64, u64, __builtin_popcountll(a)) INT(O_clz, U32, u32, a ? __builtin_clz(a) : 32) INT(O_clz, U64, u64, a ? __builtin_clzll(a) : 64)
      CASE(O_brev, U32) EACH(u32 v = A[l]; u32 made = 0; for (int i = 0; i < 32; i++) made |= (v >> i & 1) << (31 - i); D[l] = made); break;
      CASE(O_bfi, U32) CASE(O_bfi, U64) {
        u64 *E = w->r[o[4]];
        EACH(u64 from = C[l] & 255; u64 n = E[l] & 255; u64 ones_ = (n < 64 ? (1ull << n) - 1 : ~0ull); u64 field = from < 64 ? ones_ << from : 0;
             D[l] = (B[l] & ~field) | ((from < 64 ? A[l] << from : 0) & field));
        break;
      }
      CASE(O_prmt, U32) EACH(u64 both = (u32)A[l] | B[l] << 32; u32 made = 0; for (int i = 0; i < 4; i++) { u32 s = C[l] >> 4 * i; u32 byte = both >> 8 * (s & 7) & 255;
             made |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i; } D[l] = made); break;
#define CHOOSE(T) CASE(O_selp, T) EACH(D[l] = C[l] & 1 ? A[l] : B[l]); break; CASE(O_mov, T) EACH(D[l] = A[l]); break;
      CHOOSE(U16) CHOOSE(U32) CHOOSE(U64) CHOOSE(S16) CHOOSE(S32) CHOOSE(S64) CHOOSE(F32) CHOOSE(F64) CHOOSE(PRED) CHOOSE(F16)
      default: goto others;
    }
    continue;
  others:
    switch (at->op) {
      case O_cvt: EACH(D[l] = converted(at, A[l], B[l])); break;
      case O_pack: {
        int half = bits_of(at->type) / (at->operands - 1);
        EACH(u64 made = 0; for (int i = 1; i < at->operands; i++) made |= (w->r[o[i]][l] & (~0ull >> (64 - half))) << half * (i - 1); D[l] = made);
        break;
      }
      case O_unpack: {
        int parts = at->operands - 1, part = bits_of(at->type) / parts;
        EACH(u64 v = w->r[o[parts]][l]; for (int i = 0; i < parts; i++) if (o[i]) w->r[o[i]][l] = v >> part * i & (~0ull >> (64 - part)));
        break;
      }
      case O_param: EACH(D[l] = x->op->words[w->r[o[1]][l]]); break;
      case O_cvta: {
        u64 by = at->space == SHARED ? SHARED_WINDOW : at->space == LOCAL ? LOCAL_WINDOW : 0;
        EACH(D[l] = at->mode ? A[l] - by : A[l] + by);
        break;
      }
      case O_ld: case O_st: {
        int n = at->count, each = TYPES[at->type].bytes, load = at->op == O_ld;
        const u64 *from = w->r[o[load ? n : 0]];
        for (int l = 0; l < LANES; l++) if (m >> l & 1) {
          char written[32];
          for (int i = 0; !load && i < n; i++) memcpy(written + i * each, &w->r[o[1 + i]][l], each);
          char *p = place(x, w, at, at->space, l, from[l] + at->offset, n * each, load ? "reads" : "writes", load ? NULL : written);
          if (!p) return;
          for (int i = 0; i < n; i++, p += each) {
            u64 v = 0;
            if (load) memcpy(&v, p, each), w->r[o[i]][l] = at->type >= S8 && at->type <= S32 ? integer(at->type, v) : v;
            else memcpy(p, &w->r[o[1 + i]][l], each);
          }
        }
        break;
      }
      case O_bra: {
        if (m == mask) { pc = at->to - 1; break; }
        join_groups(w, at->to, m, 0), join_groups(w, pc + 1, mask & ~m, 0);
        return;
      }
      case O_ret: case O_exit:
        w->alive &= ~m;
        for (int i = 0; i < w->count; i++) w->groups[i].held = 0; /* those that have ended are not waited for */
        set_lowest(w);
        if (m != mask) join_groups(w, pc + 1, mask & ~m, 0);
        return;
      case O_bar: case O_barrier: case O_bar_red: {
        if (m != mask) { stop(x, __builtin_ctz(m), at, "a barrier for lanes %#x alone", m); return; }
        if (w->alive & ~m) { /* others are still to come, or to end */
          if (w->lowest == NOWHERE) { stop(x, __builtin_ctz(m), at, "a barrier for lanes %#x alone", m); return; }
          join_groups(w, pc, mask, 1);
          return;
        }
        if (at->op == O_bar_red) EACH(u64 p = B[l] & 1; x->any |= p; x->all &= p);
        w->parked[w->parked_count++] = (Group){pc, 0, mask};
        return;
      }
      case O_warp: case O_shfl: case O_mma: case O_ldmatrix: {
        const u64 *masks = at->op == O_warp ? w->r[o[0]] : at->op == O_shfl ? w->r[o[at->operands - 1]] : NULL;
        u32 members = masks ? masks[__builtin_ctz(m)] : ~0u;
        for (int l = 0; masks && l < LANES; l++)
          if (m >> l & 1 && ((u32)masks[l] != members || !(members >> l & 1))) {
            stop(x, l, at, "the lane names lanes %#x, lane %d names %#x", (u32)masks[l], __builtin_ctz(m), members);
            return;
          }
        if (members & w->alive & ~m) { /* others are still to come */
          if (w->lowest == NOWHERE) { stop(x, __builtin_ctz(m), at, "lanes %#x wait for lanes %#x", m, members & w->alive & ~m); return; }
          join_groups(w, pc, mask, 1);
          return;
        }
        if (at->op == O_warp) w->syncs++;
        if (at->op == O_shfl) {
          u64 given[LANES], from[LANES], how[LANES];
          int split = at->flags & SPLIT ? 1 : 0;
          memcpy(given, w->r[o[1 + split]], sizeof given), memcpy(from, w->r[o[2 + split]], sizeof from), memcpy(how, w->r[o[3 + split]], sizeof how);
          EACH(int b = from[l] & 31; int most = how[l] & 31; int part = how[l] >> 8 & 31; int first = l & part; int last = first | (most & ~part); int j;
               if (at->mode == 0) j = l - b; else if (at->mode == 1) j = l + b; else if (at->mode == 2) j = l ^ b; else j = first | (b & ~part);
               int ok = at->mode == 0 ? j >= last : j <= last; if (!ok) j = l;
               w->r[o[0]][l] = m >> j & 1 ? (u32)given[j] : 0x7fc0dead; if (split && o[1]) w->r[o[1]][l] = ok);
        } else if (at->op != O_warp && m != ~0u) {
          stop(x, __builtin_ctz(m), at, "lanes %#x alone", m);
          return;
        } else if (at->op == O_mma) multiply(w, at);
        else if (at->op == O_ldmatrix) {
          u64 from[LANES];
          unsigned short rows[8][8];
          memcpy(from, w->r[o[at->count]], sizeof from);
          for (int i = 0; i < at->count; i++) {
            for (int row = 0; row < 8; row++) {
              char *p = place(x, w, at, SHARED, 8 * i + row, (u32)from[8 * i + row] + at->offset, 16, "reads", NULL);
              if (!p) return;
              memcpy(rows[row], p, 16);
            }
            for (int l = 0; l < LANES; l++) {
              int r = l >> 2, c = (l & 3) * 2;
              w->r[o[i]][l] = at->flags & TRANSPOSED ? rows[c][r] | (u32)rows[c + 1][r] << 16 : rows[r][c] | (u32)rows[r][c + 1] << 16;
            }
          }
        }
        break;
      }
      case O_cp:
        for (int l = 0; l < LANES; l++) if (m >> l & 1) {
          int whole = w->r[o[2]][l], bytes = at->operands > 3 ? (int)w->r[o[3]][l] : whole;
          u64 to = (u32)w->r[o[0]][l] + at->offset, from = w->r[o[1]][l] + at->second;
          static const char poison[] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
          char *there = place(x, w, at, SHARED, l, to, whole, "copies to", poison);
          if (bytes < 0 || bytes > whole) { stop(x, l, at, "copies %d bytes of %d", bytes, whole); return; }
          if (!there || (bytes && !place(x, w, at, GLOBAL, l, from, bytes, "copies", NULL))) return;
          if (from % whole) { stop(x, l, at, "copies %#llx, which is no multiple of %d", from, whole); return; }
          memset(there, 255, whole), memset(x->late + to, 1, whole);
          Late one = {to, from, bytes, whole, w->groups_late[l]};
          APPEND(w->late[l], w->late_count[l], one);
        }
        break;
      case O_commit: EACH(w->groups_late[l]++); break;
      case O_wait: EACH(if (at->mode) w->groups_late[l]++; land(x, w, at, l, at->mode ? 0 : w->r[o[0]][l])); break;
      default: stop(x, -1, at, "not known here"); return;
    }
    if (x->wrong) return;
  }
}

static void run_block(Run *x, const u32 *grid, const u32 *block, Warp *warps) {
  const Code *code = x->code;
  u64 index[3] = {x->block % grid[0], x->block / grid[0] % grid[1], x->block / grid[0] / grid[1]};
  memset(x->memory, 255, x->shared);
  if (x->late) memset(x->late, 0, x->shared);
  if (x->traces) memset(x->traces, 0, x->shared * sizeof *x->traces);
  x->barriers = 0;
  for (int i = 0; i < x->warps; i++) {
    Warp *w = &warps[i];
    int lanes = x->threads - i * LANES < LANES ? x->threads - i * LANES : LANES;
    w->number = i, w->alive = lanes == LANES ? ~0u : (1u << lanes) - 1;
    w->parked_count = w->count = w->syncs = 0;
    memset(w->groups_late, 0, sizeof w->groups_late), memset(w->late_count, 0, sizeof w->late_count);
    memset(w->local, 255, LANES * code->local);
    for (int l = 0; l < LANES; l++) {
      u32 thread = i * LANES + l;
      w->r[R_TID][l] = thread % block[0], w->r[R_TID + 1][l] = thread / block[0] % block[1], w->r[R_TID + 2][l] = thread / block[0] / block[1];
      for (int d = 0; d < 3; d++) w->r[R_NTID + d][l] = block[d], w->r[R_CTAID + d][l] = index[d], w->r[R_NCTAID + d][l] = grid[d];
      w->r[R_LANE][l] = l;
      for (int c = 0; c < code->constant_count; c++) w->r[code->constant_registers[c]][l] = code->constants[c];
    }
    join_groups(w, 0, w->alive, 0);
  }
  for (;;) {
    int waiting = 0;
    x->any = 0, x->all = 1;
    for (int i = 0; i < x->warps; i++) {
      Warp *w = &warps[i];
      x->warp = w;
      while (w->count && !x->wrong) {
        if (w->lowest == NOWHERE) { stop(x, -1, &code->all[w->groups[0].pc], "lanes %#x wait for others that have ended or are at a barrier", w->groups[0].mask); break; }
        go_on(x, w);
      }
      waiting += w->parked_count > 0;
    }
    if (x->wrong || !waiting) return;
    int pc = -1;
    x->barriers++;
    for (int i = 0; i < x->warps; i++) {
      Warp *w = &warps[i];
      for (int g = 0; g < w->parked_count; g++) {
        if (pc < 0) pc = w->parked[g].pc;
        if (w->parked[g].pc != pc) { stop(x, i * LANES, &code->all[pc], "threads are at two barriers"); return; }
      }
    }
    const Instruction *at = &code->all[pc];
    for (int i = 0; i < x->warps; i++) {
      Warp *w = &warps[i];
      for (int g = 0; g < w->parked_count; g++) {
        u32 m = w->parked[g].mask;
        if (at->op == O_bar_red) EACH(w->r[at->x[0]][l] = at->mode ? x->all : x->any);
        join_groups(w, pc + 1, m, 0);
      }
      w->parked_count = 0;
    }
  }
}

/* A launch, whose arrays are in reach. */
static void execute(Op *op) {
  Kernel *k = op->kernel;
  if (!k->code) k->code = code_of(k->ptx, k->count);
  Code *code = k->code;
  if (code->wrong) { went_wrong = wrong(LAUNCH_FAILED, "%s: PTX: %s", k->name, code->wrong); return; }
  const u32 *grid = op->shape, *block = op->shape + 3;
  Run x = {.op = op, .code = code, .threads = block[0] * block[1] * block[2], .shared = code->shared + op->shape[6]};
  x.warps = (x.threads + LANES - 1) / LANES;
  x.reachable = malloc(sizeof *x.reachable * (op->given + code->symbol_count + 1));
  for (int i = 0; i < op->given; i++) {
    int kind;
    char *contents;
    if (!op->spans[i].bytes || reach(k->name, op->spans[i].address, op->spans[i].bytes, op->context, &contents, &kind)) continue;
    Block *b = block_at(op->spans[i].address);
    if (races && b && !b->traces && b->size <= 16 << 20) b->traces = calloc(b->size, sizeof *b->traces);
    x.reachable[x.count++] = (Reachable){op->spans[i].address, op->spans[i].bytes, contents, b && b->traces ? b->traces + (op->spans[i].address - b->base) : NULL};
  }
  for (int i = 0; i < code->symbol_count; i++)
    if (code->symbols[i].space == GLOBAL) x.reachable[x.count++] = (Reachable){code->symbols[i].at, code->symbols[i].bytes, code->symbols[i].contents, NULL};
  for (int i = 0; i < code->count; i++) if (code->all[i].op == O_cp && !x.late) x.late = malloc(x.shared + 1);
  x.memory = malloc(x.shared + 16), x.traces = races ? calloc(x.shared + 1, sizeof *x.traces) : NULL;
  launches++;
  int registers = R_OWN + code->register_count + code->constant_count;
  Warp *warps = calloc(x.warps, sizeof *warps);
  for (int i = 0; i < x.warps; i++) warps[i].r = calloc(registers, sizeof *warps[i].r), warps[i].local = malloc(LANES * code->local + 1);
  u64 blocks_ = (u64)grid[0] * grid[1] * grid[2];
  u64 step = counting && blocks_ > (u64)counting ? blocks_ / counting : 1; /* when all is counted, not all is executed */
  for (u64 i = 0; i < blocks_ && !x.wrong; i += step) { x.block = i; run_block(&x, grid, block, warps); code->counted[C_BLOCKS]++; }
  for (int i = 0; i < x.warps; i++) {
    free(warps[i].r), free(warps[i].local);
    for (int l = 0; l < LANES; l++) free(warps[i].late[l]);
  }
  free(warps), free(x.traces), free(x.late), free(x.memory), free(x.reachable);
}
/* What was counted of a kernel's launches; NULL of one that was not executed. */
const double *dry_counted(Kernel *kernel) { return kernel->code ? kernel->code->counted : NULL; }
