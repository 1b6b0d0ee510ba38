/* NVIDIA's driver for GPUs that are not there: it allocates, copies, orders and checks, and computes nothing
   but copies and folds.

   Memory of a GPU is a range of addresses that the host can neither read nor write; only copies reach its
   contents, which lie elsewhere (DRY_OPEN: there, as for MPI that takes addresses of GPUs). Work is done as late as it may be, when somebody waits for it, so what
   reads without waiting finds what was there before. A kernel's launch is compared with the parameters that
   its machine code names and with the allocations that it is given.

   What a driver refuses, leaves undefined, or does while everybody waits is an error here, and is said
   (dry_said): memory that is not there or was given back, streams and events that were destroyed, calls
   without a current context, what a capture forbids, copies enqueued of memory that is not page-locked.
   Any call that may fail can be made to (dry_fail). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef unsigned long long u64;
typedef unsigned u32;
enum { OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT, INVALID_HANDLE = 400,
       NOT_FOUND = 500, NOT_READY = 600, PEERS_ALREADY = 704, PEERS_NOT = 705, LAUNCH_FAILED = 719, OUT_OF_RESOURCES = 701, CAPTURE_UNSUPPORTED = 900, INVALIDATED,
       UNMATCHED = 903, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD, UNKNOWN = 999 };
enum { DEVICES = 4, PAGE = 4096, MOST_PARAMETERS = 1024 };
static const u64 MEMORY = 2ull << 30, WINDOW = 1ull << 42, PINNED_WINDOW = 1ull << 38;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void leave(int *_) { pthread_mutex_unlock(&lock); }
#define TURN __attribute__((cleanup(leave), unused)) int turn_ = pthread_mutex_lock(&lock)
#define NEED(call) do { int code_ = (call); if (code_) return code_; } while (0)
#define APPEND(list, count, item) \
  do { (list) = realloc(list, sizeof *(list) * ((count) + 1)); (list)[(count)++] = (item); } while (0)

static char *said;
static size_t said_bytes;
/* Counted: contexts, streams, events, graphs, allocations, pinned, libraries: made and given back; launches,
   nodes of captures, launches of graphs, copies, bytes copied, frees of what work was waiting for. */
enum { CONTEXTS, CONTEXTS_GIVEN, STREAMS, STREAMS_GIVEN, EVENTS, EVENTS_GIVEN, GRAPHS, GRAPHS_GIVEN, EXECS, EXECS_GIVEN,
       ALLOCATIONS, ALLOCATIONS_GIVEN, PINNED, PINNED_GIVEN, LIBRARIES, LIBRARIES_GIVEN, LAUNCHES, NODES, GRAPH_LAUNCHES,
       COPIES, SYNCHRONOUS, COUNTS };
static u64 counts[COUNTS];
const u64 *dry_counts(void) { return counts; }
static int went_wrong; /* what a kernel did that was executed: the error of whoever waits next */
static int told(void) { int code = went_wrong; went_wrong = OK; return code; }
static int races; /* whether accesses of kernels are compared with those before */
static long counting; /* of each launch, how many blocks are executed, and counted; 0: all are executed, none is counted */
static int readable; /* whether the host reads and writes a GPU's memory */
__attribute__((constructor)) static void in_environment(void) {
  readable = getenv("DRY_OPEN") != NULL, races = getenv("DRY_RACES") != NULL;
  counting = getenv("DRY_COUNT") ? atol(getenv("DRY_COUNT")) : 0;
}
const char *dry_said(void) { return said ? said : ""; }
/* One call can be made to fail, without an effect: the nth from now on of those that may, which are all but
   those that give something back. dry_stop: none from now on. */
static long calls, fails;
static const char *failed;
void dry_fail(long nth) { calls = 0, fails = nth, failed = NULL; }
void dry_stop(void) { fails = 0; }
const char *dry_failed(void) { return failed ? failed : ""; }
static int failing(const char *call) {
  if (++calls != fails) return OK;
  failed = call;
  return UNKNOWN;
}
#define CALL TURN; NEED(failing(__func__))

static char last[600];
static int wrong(int code, const char *text, ...) {
  char line[600];
  va_list arguments;
  va_start(arguments, text);
  int n = vsnprintf(line, sizeof line - 1, text, arguments);
  va_end(arguments);
  strcpy(last, line);
  n = n < (int)sizeof line - 2 ? n : (int)sizeof line - 2;
  line[n++] = '\n';
  said = realloc(said, said_bytes + n + 1);
  memcpy(said + said_bytes, line, n);
  said[said_bytes += n] = 0;
  return code;
}

/* Contexts: each device's primary one. */
typedef struct Op Op;
typedef struct Stream Stream;
typedef struct Capture Capture;
typedef struct { Stream *stream; long position; } Point;
typedef struct { u64 address, bytes; } Span;
typedef struct { int *nodes; int count; } Tails;
struct Stream { u32 magic; int context, blocking; Op *ops; long count, done; Capture *capture; Tails tails; };
typedef struct { u32 magic; int device, retained, peers[DEVICES]; Stream legacy; u64 used; } Context;
typedef struct { u32 magic, flags; int context, recorded; Point at; Capture *capture; Tails tails; double ms; } Event;
typedef struct { char *name, *ptx; struct Code *code; u32 magic, registers, shared; int count, offsets[MOST_PARAMETERS], sizes[MOST_PARAMETERS]; } Kernel;
typedef struct { u32 magic; Kernel **kernels; int count; } Library;
typedef struct { u64 base, size; int pinned, alive, context; char *contents; struct Trace *traces; } Block;
struct Op { enum { COPY, SET, LAUNCH, RECORD, NOTHING, RUN } kind; u64 to, from, bytes; int value; Point *after; int afters;
            Kernel *kernel; u32 shape[7]; Span *spans; int given; u64 *words; Event *event; struct Graph *graph; int context; };
typedef struct Graph { u32 magic; Op *ops; Tails *before; int count; Tails last; } Graph;
struct Capture { int alive, invalid, mode; pthread_t thread; Stream *origin, **streams; int joined; Graph *graph; };
enum { A_STREAM = 0x5712ea00, AN_EVENT = 0xe7e27000, A_GRAPH = 0x62a90000, AN_EXEC, A_KERNEL = 0x4e20e100, A_LIBRARY };

static Context contexts[DEVICES];
static __thread int stack[64], depth;
static __thread Capture *capturing; /* that this thread began */
static Stream **streams;
static int stream_count;
static Block *blocks;
static int block_count;
static u64 window, pinned_window, next_device, next_pinned;

static int here(const char *call) {
  return depth ? OK : wrong(INVALID_CONTEXT, "%s: no context is current in this thread", call);
}
static Context *current(void) { return &contexts[stack[depth - 1]]; }

/* A capture of this thread forbids what may wait, allocate or load; anybody's forbids the legacy stream. */
static int outside(const char *call) {
  if (!capturing) return OK;
  capturing->invalid = 1;
  return wrong(CAPTURE_UNSUPPORTED, "%s: not while this thread captures", call);
}
static int no_capture_of(int context, const char *call) {
  for (int i = 0; i < stream_count; i++) {
    Stream *s = streams[i];
    if (s->magic == A_STREAM && s->context == context && s->blocking && s->capture) {
      s->capture->invalid = 1;
      return wrong(IMPLICIT, "%s: the legacy stream would wait for a stream that is captured", call);
    }
  }
  return OK;
}

/* Memory. */
static Block *block_at(u64 address) {
  int low = 0, high = block_count; /* windows apart, each in order of addresses: few, so a look at all is fine */
  for (; low < high; high--) if (address - blocks[high - 1].base < blocks[high - 1].size) return &blocks[high - 1];
  return NULL;
}
static int in_windows(u64 address) { return address - window < WINDOW || address - pinned_window < PINNED_WINDOW; }
static int reach(const char *call, u64 address, u64 bytes, int context, char **found, int *kind) {
  *kind = 2, *found = (char *)address;
  Block *b = block_at(address);
  if (!in_windows(address) && !(b && b->alive)) return OK;
  if (!b) return wrong(INVALID_VALUE, "%s: %#llx is in no allocation", call, address);
  if (!b->alive) return wrong(INVALID_VALUE, "%s: %#llx was given back", call, address);
  if (address + bytes > b->base + b->size)
    return wrong(INVALID_VALUE, "%s: %llu bytes at %#llx pass the end of an allocation of %llu by %llu", call, bytes, address,
                 b->size, address + bytes - b->base - b->size);
  if (!b->pinned && context >= 0 && b->context != context && !contexts[context].peers[b->context])
    return wrong(PEERS_NOT, "%s: GPU %d has no access to the memory of GPU %d", call, context, b->context);
  *kind = b->pinned, *found = b->contents + (address - b->base);
  return OK;
}

/* Work: put on streams, done when waited for. */
static void run(Stream *s, long upto);
static void walk(Op *op);
static void execute(Op *op);
static void perform(Op *op) {
  char *to, *from;
  int kind;
  if (op->kind == COPY) {
    if (reach("a copy", op->to, op->bytes, op->context, &to, &kind)) return;
    if (reach("a copy", op->from, op->bytes, -1, &from, &kind)) return;
    memmove(to, from, op->bytes);
  } else if (op->kind == SET) {
    if (!reach("a memset", op->to, op->bytes, op->context, &to, &kind)) memset(to, op->value, op->bytes);
  } else if (op->kind == LAUNCH) {
    for (int i = 0; i < op->given; i++) if (reach(op->kernel->name, op->spans[i].address, op->spans[i].bytes, op->context, &to, &kind)) return;
    op->kernel->ptx ? execute(op) : walk(op);
  } else if (op->kind == RECORD) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    op->event->ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
  } else if (op->kind == RUN) {
    for (int i = 0; i < op->graph->count; i++) perform(&op->graph->ops[i]);
  }
}
static void run(Stream *s, long upto) {
  while (s->done < upto) {
    Op *op = &s->ops[s->done];
    for (int i = 0; i < op->afters; i++) { Point p = op->after[i]; run(p.stream, p.position); op = &s->ops[s->done]; }
    perform(op);
    s->done++;
  }
}
static void run_all(int context) {
  for (int i = 0; i < stream_count; i++) if (context < 0 || streams[i]->context == context) run(streams[i], streams[i]->count);
  for (int i = 0; i < DEVICES; i++) if (context < 0 || i == context) run(&contexts[i].legacy, contexts[i].legacy.count);
}
static void after(Op *op, Stream *s, long position) {
  if (position > s->done) { Point p = {s, position}; APPEND(op->after, op->afters, p); }
}
static int enqueue(Stream *s, Op op) {
  op.context = s->context;
  if (s->capture) {
    Graph *g = s->capture->graph;
    int count = g->count, node = count;
    APPEND(g->ops, g->count, op);
    APPEND(g->before, count, s->tails);
    s->tails = (Tails){malloc(sizeof(int)), 1};
    s->tails.nodes[0] = node;
    counts[NODES] += op.kind < RECORD;
    return OK;
  }
  Stream *legacy = &contexts[s->context].legacy;
  if (s == legacy) {
    for (int i = 0; i < stream_count; i++)
      if (streams[i]->magic == A_STREAM && streams[i]->context == s->context && streams[i]->blocking) after(&op, streams[i], streams[i]->count);
  } else if (s->blocking) after(&op, legacy, legacy->count);
  APPEND(s->ops, s->count, op);
  return OK;
}
static int stream_of(const char *call, Stream *given, Stream **found) {
  NEED(here(call));
  if (!given || given == (Stream *)1) {
    *found = &current()->legacy;
    return no_capture_of(stack[depth - 1], call);
  }
  *found = given;
  return given->magic == A_STREAM ? OK : wrong(INVALID_HANDLE, "%s: a stream that was destroyed", call);
}
static int event_of(const char *call, Event *e) {
  return e && e->magic == AN_EVENT ? OK : wrong(INVALID_HANDLE, "%s: an event that was destroyed", call);
}

int cuInit(u32 flags) {
  TURN;
  if (window) return OK;
  window = next_device = (u64)mmap(NULL, WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  pinned_window = next_pinned = (u64)mmap(NULL, PINNED_WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (int i = 0; i < DEVICES; i++) contexts[i] = (Context){.device = i, .legacy = {.magic = A_STREAM, .context = i}};
  return OK;
}
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return OK; }
int cuDeviceGet(int *device, int number) { *device = number; return number < DEVICES ? OK : INVALID_DEVICE; }
int cuDeviceGetName(char *name, int bytes, int device) { snprintf(name, bytes, "Dry %d", device); return OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = MEMORY; return OK; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;
    case 4: case 5: *value = attribute == 4 ? 64 : 65535; break;
    case 16: *value = 132; break; /* multiprocessors */
    case 10: *value = 32; break;
    case 38: *value = 50 << 20; break; /* last cache */
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    default: *value = 1;
  }
  return OK;
}
int cuDevicePrimaryCtxRetain(Context **found, int device) {
  CALL;
  *found = &contexts[device];
  counts[CONTEXTS] += !contexts[device].retained++;
  return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  TURN;
  if (!contexts[device].retained) return wrong(INVALID_CONTEXT, "a context was released that nobody has");
  counts[CONTEXTS_GIVEN] += !--contexts[device].retained;
  return OK;
}
int cuCtxPushCurrent_v2(Context *context) {
  CALL;
  if (depth == 64) return wrong(INVALID_VALUE, "cuCtxPushCurrent: 64 contexts are on the stack");
  stack[depth++] = context->device;
  return OK;
}
int cuCtxPopCurrent_v2(Context **found) {
  NEED(here("cuCtxPopCurrent"));
  Context *top = &contexts[stack[--depth]];
  if (found) *found = top;
  return OK;
}
int cuCtxGetCurrent(Context **found) { *found = depth ? current() : NULL; return OK; }
int cuCtxSetCurrent(Context *context) {
  if (depth) depth--;
  if (context) stack[depth++] = context->device;
  return OK;
}
int cuCtxGetDevice(int *device) { NEED(here("cuCtxGetDevice")); *device = stack[depth - 1]; return OK; }
int cuCtxGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -5; return OK; }
int cuCtxSynchronize(void) {
  CALL;
  NEED(here("cuCtxSynchronize"));
  NEED(outside("cuCtxSynchronize"));
  run_all(stack[depth - 1]);
  return told();
}
int cuCtxEnablePeerAccess(Context *peer, u32 flags) {
  CALL;
  NEED(here("cuCtxEnablePeerAccess"));
  int *peers = current()->peers;
  return peers[peer->device]++ ? PEERS_ALREADY : OK; /* by another library, perhaps */
}

static int allocate(u64 *next, size_t bytes, int pinned, u64 *found) {
  if (!bytes) return wrong(INVALID_VALUE, "an allocation of no bytes");
  Context *c = current();
  if (!pinned && c->used + bytes > MEMORY) return OUT_OF_MEMORY;
  u64 whole = (bytes + PAGE - 1) / PAGE * PAGE;
  Block b = {*next, bytes, pinned, 1, stack[depth - 1], NULL, NULL};
  if (pinned || readable) {
    if (mprotect((void *)b.base, whole, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
    b.contents = (char *)b.base;
  } else {
    b.contents = malloc(bytes);
  }
  memset(b.contents, 255, bytes); /* NaN: what nobody has written shows */
  if (!pinned) c->used += bytes;
  *next += whole + PAGE; /* addresses are never used again, and none is at the end of another's */
  APPEND(blocks, block_count, b);
  *found = b.base;
  counts[pinned ? PINNED : ALLOCATIONS]++;
  return OK;
}
static int give_back(const char *call, u64 address, int pinned) {
  NEED(here(call));
  NEED(outside(call));
  Block *b = block_at(address);
  if (!b || b->base != address || b->pinned != pinned) return wrong(INVALID_VALUE, "%s: %#llx is no allocation", call, address);
  if (!b->alive) return wrong(INVALID_VALUE, "%s: %#llx was given back before", call, address);
  run_all(-1); /* a driver waits too */
  b->alive = 0;
  free(b->traces), b->traces = NULL;
  if (!pinned) contexts[b->context].used -= b->size;
  if (b->contents != (char *)b->base) free(b->contents);
  else mprotect((void *)b->base, (b->size + PAGE - 1) / PAGE * PAGE, PROT_NONE), madvise((void *)b->base, b->size, MADV_DONTNEED);
  counts[pinned ? PINNED_GIVEN : ALLOCATIONS_GIVEN]++;
  return OK;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  CALL;
  NEED(here("cuMemGetInfo"));
  *free_bytes = MEMORY - current()->used, *total = MEMORY;
  return OK;
}
int cuMemAlloc_v2(u64 *found, size_t bytes) { CALL; NEED(here("cuMemAlloc")); NEED(outside("cuMemAlloc")); return allocate(&next_device, bytes, 0, found); }
int cuMemFree_v2(u64 address) { TURN; return give_back("cuMemFree", address, 0); }
int cuMemHostAlloc(u64 *found, size_t bytes, u32 flags) {
  CALL;
  NEED(here("cuMemHostAlloc"));
  NEED(outside("cuMemHostAlloc"));
  return allocate(&next_pinned, bytes, 1, found);
}
int cuMemHostRegister_v2(void *memory, size_t bytes, u32 flags) {
  CALL;
  NEED(here("cuMemHostRegister"));
  u64 first = (u64)memory;
  if (!bytes || first % PAGE || bytes % PAGE) return wrong(INVALID_VALUE, "cuMemHostRegister: %p is not of whole pages", memory);
  for (int i = 0; i < block_count; i++)
    if (blocks[i].alive && first < blocks[i].base + blocks[i].size && blocks[i].base < first + bytes)
      return wrong(INVALID_VALUE, "cuMemHostRegister: some of %p is page-locked already", memory);
  APPEND(blocks, block_count, ((Block){first, bytes, 1, 1, stack[depth - 1], memory, NULL}));
  counts[PINNED]++;
  return OK;
}
int cuMemHostUnregister(void *memory) {
  TURN;
  NEED(here("cuMemHostUnregister"));
  Block *b = block_at((u64)memory);
  if (!b || b->base != (u64)memory || !b->alive) return wrong(INVALID_VALUE, "cuMemHostUnregister: %p is not page-locked", memory);
  run_all(-1);
  b->alive = 0;
  counts[PINNED_GIVEN]++;
  return OK;
}
int cuMemFreeHost(u64 address) { TURN; return give_back("cuMemFreeHost", address, 1); }

static int copy(const char *call, u64 to, u64 from, size_t bytes, Stream *on, int waits) {
  char *at;
  int target, source;
  Stream *s;
  NEED(stream_of(call, on, &s));
  if (waits) NEED(outside(call));
  NEED(reach(call, to, bytes, stack[depth - 1], &at, &target));
  NEED(reach(call, from, bytes, -1, &at, &source));
  if (!waits && (target == 2 || source == 2))
    return wrong(INVALID_VALUE, "%s: %llu bytes of the host that are not page-locked", call, (u64)bytes);
  if (target + source == 4) return wrong(INVALID_VALUE, "%s: both ends are the host's", call);
  counts[COPIES]++, counts[SYNCHRONOUS] += waits;
  NEED(enqueue(s, (Op){.kind = COPY, .to = to, .from = from, .bytes = bytes}));
  if (waits) run(s, s->count);
  return waits ? told() : OK;
}
int cuMemcpyHtoD_v2(u64 to, u64 from, size_t n) { CALL; return copy("cuMemcpyHtoD", to, from, n, NULL, 1); }
int cuMemcpyDtoH_v2(u64 to, u64 from, size_t n) { CALL; return copy("cuMemcpyDtoH", to, from, n, NULL, 1); }
int cuMemcpyDtoD_v2(u64 to, u64 from, size_t n) { CALL; return copy("cuMemcpyDtoD", to, from, n, NULL, 1); }
int cuMemcpyHtoDAsync_v2(u64 to, u64 from, size_t n, Stream *s) { CALL; return copy("cuMemcpyHtoDAsync", to, from, n, s, 0); }
int cuMemcpyDtoHAsync_v2(u64 to, u64 from, size_t n, Stream *s) { CALL; return copy("cuMemcpyDtoHAsync", to, from, n, s, 0); }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t n, Stream *s) { CALL; return copy("cuMemcpyDtoDAsync", to, from, n, s, 0); }
static int set(const char *call, u64 to, unsigned char value, size_t bytes, Stream *on) {
  char *at;
  int kind;
  Stream *s;
  NEED(stream_of(call, on, &s));
  NEED(reach(call, to, bytes, stack[depth - 1], &at, &kind));
  return enqueue(s, (Op){.kind = SET, .to = to, .bytes = bytes, .value = value}); /* the host does not wait for one of a GPU's memory */
}
int cuMemsetD8_v2(u64 to, unsigned char value, size_t n) { CALL; NEED(outside("cuMemsetD8")); return set("cuMemsetD8", to, value, n, NULL); }
int cuMemsetD8Async(u64 to, unsigned char value, size_t n, Stream *s) { CALL; return set("cuMemsetD8Async", to, value, n, s); }

int cuStreamCreate(Stream **found, u32 flags) {
  CALL;
  NEED(here("cuStreamCreate"));
  Stream *s = calloc(1, sizeof *s);
  *s = (Stream){.magic = A_STREAM, .context = stack[depth - 1], .blocking = !(flags & 1)};
  APPEND(streams, stream_count, s);
  *found = s;
  counts[STREAMS]++;
  return OK;
}
int cuStreamDestroy_v2(Stream *s) {
  TURN;
  Stream *found;
  NEED(stream_of("cuStreamDestroy", s, &found));
  if (s->capture) return wrong(CAPTURE_UNSUPPORTED, "cuStreamDestroy: a stream that is captured");
  run(s, s->count); /* what it has is still done */
  s->magic = 0;
  counts[STREAMS_GIVEN]++;
  return OK;
}
int cuStreamSynchronize(Stream *given) {
  CALL;
  Stream *s;
  NEED(stream_of("cuStreamSynchronize", given, &s));
  NEED(outside("cuStreamSynchronize"));
  if (s->capture) { s->capture->invalid = 1; return wrong(CAPTURE_UNSUPPORTED, "cuStreamSynchronize: a stream that is captured"); }
  if (s == &current()->legacy) enqueue(s, (Op){.kind = NOTHING});
  run(s, s->count);
  return told();
}
int cuStreamGetCtx(Stream *given, Context **found) {
  CALL;
  Stream *s;
  NEED(stream_of("cuStreamGetCtx", given, &s));
  *found = &contexts[s->context];
  return OK;
}

int cuEventCreate(Event **found, u32 flags) {
  CALL;
  NEED(here("cuEventCreate"));
  Event *e = calloc(1, sizeof *e);
  *e = (Event){.magic = AN_EVENT, .flags = flags, .context = stack[depth - 1]};
  *found = e;
  counts[EVENTS]++;
  return OK;
}
int cuEventDestroy_v2(Event *e) {
  TURN;
  NEED(here("cuEventDestroy"));
  NEED(event_of("cuEventDestroy", e));
  e->magic = 0;
  counts[EVENTS_GIVEN]++;
  return OK;
}
int cuEventRecord(Event *e, Stream *given) {
  CALL;
  Stream *s;
  NEED(stream_of("cuEventRecord", given, &s));
  NEED(event_of("cuEventRecord", e));
  if (e->context != s->context) return wrong(INVALID_HANDLE, "cuEventRecord: an event of GPU %d on a stream of GPU %d", e->context, s->context);
  e->capture = s->capture;
  if (s->capture) { e->tails = s->tails; return OK; }
  NEED(enqueue(s, (Op){.kind = RECORD, .event = e}));
  e->recorded = 1, e->at = (Point){s, s->count};
  return OK;
}
static int outside_event(const char *call, Event *e) {
  NEED(here(call));
  NEED(event_of(call, e));
  NEED(outside(call));
  return e->capture ? wrong(CAPTURED_EVENT, "%s: an event that was recorded in a capture", call) : OK;
}
int cuEventSynchronize(Event *e) {
  CALL;
  NEED(outside_event("cuEventSynchronize", e));
  if (e->recorded) run(e->at.stream, e->at.position);
  return told();
}
int cuEventQuery(Event *e) {
  CALL;
  NEED(outside_event("cuEventQuery", e));
  return !e->recorded || e->at.stream->done >= e->at.position ? OK : NOT_READY;
}
int cuEventElapsedTime_v2(float *ms, Event *begun, Event *ended) {
  CALL;
  NEED(outside_event("cuEventElapsedTime", begun));
  NEED(outside_event("cuEventElapsedTime", ended));
  if (!begun->recorded || !ended->recorded || begun->flags & 2 || ended->flags & 2 || begun->context != ended->context)
    return wrong(INVALID_HANDLE, "cuEventElapsedTime: events of two GPUs, without times or not recorded");
  if (begun->at.stream->done < begun->at.position || ended->at.stream->done < ended->at.position)
    return wrong(NOT_READY, "cuEventElapsedTime: an event that has not occurred");
  *ms = ended->ms - begun->ms;
  return OK;
}
static void join(Tails *own, const Tails *more) {
  Tails both = {NULL, 0};
  for (int i = 0; i < own->count; i++) APPEND(both.nodes, both.count, own->nodes[i]);
  for (int i = 0; i < more->count; i++) APPEND(both.nodes, both.count, more->nodes[i]);
  *own = both;
}
int cuStreamWaitEvent(Stream *given, Event *e, u32 flags) {
  CALL;
  Stream *s;
  NEED(stream_of("cuStreamWaitEvent", given, &s));
  NEED(event_of("cuStreamWaitEvent", e));
  if (e->capture) {
    Capture *c = e->capture;
    if (!c->alive) return wrong(CAPTURED_EVENT, "cuStreamWaitEvent: an event of a capture that has ended");
    if (s->capture && s->capture != c) return wrong(ISOLATION, "cuStreamWaitEvent: an event of another capture");
    if (!s->capture) {
      s->capture = c, s->tails = e->tails;
      APPEND(c->streams, c->joined, s);
      return enqueue(s, (Op){.kind = NOTHING}); /* by which it is told whether the stream comes back */
    }
    join(&s->tails, &e->tails);
    return OK;
  }
  if (s->capture) {
    s->capture->invalid = 1;
    return wrong(ISOLATION, "cuStreamWaitEvent: in a capture, an event that was recorded outside of it");
  }
  Op op = {.kind = NOTHING};
  if (e->recorded) after(&op, e->at.stream, e->at.position);
  return enqueue(s, op);
}

#include "libcuda_dry_graphs.h"
#include "libcuda_dry_code.h"
#include "libcuda_dry_ptx.h"
int cuLaunchKernel(Kernel *k, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, Stream *on, void **given, void **extra) {
  CALL;
  Stream *s;
  NEED(stream_of("cuLaunchKernel", on, &s));
  if (k->magic != A_KERNEL || extra) return wrong(INVALID_HANDLE, "cuLaunchKernel: no kernel");
  if (!gx || !gy || !gz || !bx || !by || !bz || gx > 0x7fffffff || gy > 65535 || gz > 65535 || bz > 64 || (u64)bx * by * bz > 1024)
    return wrong(INVALID_VALUE, "%s: grid %u %u %u of blocks of %u %u %u", k->name, gx, gy, gz, bx, by, bz);
  u32 warps = (bx * by * bz + 127) / 128 * 4, of_warp = (k->registers * 32 + 255) / 256 * 256;
  if (warps * of_warp > 65536) return wrong(OUT_OF_RESOURCES, "%s: %u registers of %u threads, of 65536", k->name, k->registers, bx * by * bz);
  if (shared + k->shared > 48 << 10) return wrong(INVALID_VALUE, "%s: %u bytes of shared memory", k->name, shared + k->shared);
  Op op = {.kind = LAUNCH, .kernel = k, .shape = {gx, gy, gz, bx, by, bz, shared}};
  spans(k, given, &op);
  for (int i = 0; i < op.given; i++) {
    char *at;
    int kind;
    NEED(reach(k->name, op.spans[i].address, op.spans[i].bytes, s->context, &at, &kind));
  }
  counts[LAUNCHES]++;
  return enqueue(s, op);
}
typedef struct { u32 gx, gy, gz, bx, by, bz, shared; Stream *stream; void *attributes; u32 count; } Configuration;
int cuLaunchKernelEx(const Configuration *c, Kernel *k, void **given, void **extra) {
  return cuLaunchKernel(k, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, given, extra);
}

int cuGetErrorName(int code, const char **text) { *text = "error"; return OK; }
int cuGetErrorString(int code, const char **text) { *text = code == LAUNCH_FAILED ? last : "see dry_said"; return OK; }
int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
  static void *own;
  if (!own) own = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  static const char *forms[] = {"%s", "%s_v2", "%sWithFlags"};
  char whole[200];
  *function = NULL;
  for (int i = 0; !*function && i < 3; i++) { snprintf(whole, sizeof whole, forms[i], name); *function = dlsym(own, whole); }
  if (status) *status = *function ? 0 : 1;
  return OK;
}
