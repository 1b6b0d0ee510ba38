/* Captures and graphs. */
int cuStreamBeginCapture_v2(Stream *s, int mode) {
  CALL;
  Stream *found;
  NEED(stream_of("cuStreamBeginCapture", s, &found));
  if (found == &current()->legacy || s->capture || capturing) return wrong(CAPTURE_UNSUPPORTED, "cuStreamBeginCapture: a second one, or the legacy stream");
  Capture *c = calloc(1, sizeof *c);
  *c = (Capture){.alive = 1, .mode = mode, .thread = pthread_self(), .origin = s, .graph = calloc(1, sizeof(Graph))};
  s->capture = c, s->tails = (Tails){NULL, 0};
  APPEND(c->streams, c->joined, s);
  capturing = mode == 2 ? NULL : c;
  return OK;
}
static void mark(const Graph *g, const Tails *from, char *seen) {
  for (int i = 0; i < from->count; i++)
    if (!seen[from->nodes[i]]) { seen[from->nodes[i]] = 1; mark(g, &g->before[from->nodes[i]], seen); }
}
int cuStreamEndCapture(Stream *s, Graph **found) {
  TURN;
  Stream *checked;
  *found = NULL;
  NEED(stream_of("cuStreamEndCapture", s, &checked));
  Capture *c = s->capture;
  if (!c || c->origin != s) return wrong(UNMATCHED, "cuStreamEndCapture: a stream that did not begin a capture");
  if (!pthread_equal(c->thread, pthread_self())) return wrong(WRONG_THREAD, "cuStreamEndCapture: another thread began it");
  char *seen = calloc(1, c->graph->count + 1);
  mark(c->graph, &s->tails, seen);
  int joined = 1;
  for (int i = 0; i < c->joined; i++) {
    for (int t = 0; t < c->streams[i]->tails.count; t++) joined &= seen[c->streams[i]->tails.nodes[t]];
    c->streams[i]->capture = NULL;
  }
  c->alive = 0, capturing = NULL;
  NEED(failing(__func__)); /* the capture has ended all the same */
  if (c->invalid) return INVALIDATED;
  if (!joined && failed) return UNJOINED; /* what would have joined it may have failed */
  if (!joined) return wrong(UNJOINED, "cuStreamEndCapture: a stream that the first one does not wait for");
  c->graph->magic = A_GRAPH;
  *found = c->graph;
  counts[GRAPHS]++;
  return OK;
}
int cuGraphInstantiateWithFlags(Graph **found, Graph *g, u64 flags) {
  CALL;
  if (g->magic != A_GRAPH) return wrong(INVALID_HANDLE, "cuGraphInstantiate: a graph that was destroyed");
  *found = malloc(sizeof *g);
  **found = *g;
  (*found)->magic = AN_EXEC;
  counts[EXECS]++;
  return OK;
}
int cuGraphDestroy(Graph *g) {
  TURN;
  if (g->magic != A_GRAPH) return wrong(INVALID_HANDLE, "cuGraphDestroy: a graph that was destroyed");
  g->magic = 0;
  counts[GRAPHS_GIVEN]++;
  return OK;
}
int cuGraphExecDestroy(Graph *g) {
  TURN;
  if (g->magic != AN_EXEC) return wrong(INVALID_HANDLE, "cuGraphExecDestroy: a graph that was destroyed");
  run_all(-1);
  g->magic = 0;
  counts[EXECS_GIVEN]++;
  return OK;
}
int cuGraphLaunch(Graph *g, Stream *given) {
  CALL;
  Stream *s;
  NEED(stream_of("cuGraphLaunch", given, &s));
  if (g->magic != AN_EXEC) return wrong(INVALID_HANDLE, "cuGraphLaunch: a graph that was destroyed");
  counts[GRAPH_LAUNCHES]++;
  return enqueue(s, (Op){.kind = RUN, .graph = g});
}
