// bulk.cu on the host: 32 lanes as coroutines that meet at warp-wide calls, and a bulk copy engine that is
// as late as its rules allow. A load's bytes arrive when its barrier is waited for, or at some earlier
// moment that a random number chooses; a store reads its stage when it is waited for, or earlier likewise.
// A stage that is read too early holds poison, one that is overwritten too early spoils the store.

#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <vector>

#define KVFERRY_BULK_MODEL
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, gridDim;

// a warp: each lane runs until its next warp-wide call, then the next lane does
static const int LANES = 32, STACK = 1 << 16;
static ucontext_t main_context, lane_context[LANES];
static char stacks[LANES][STACK] __attribute__((aligned(16)));
static unsigned votes[2][LANES], vote_round[LANES];
static int running;
static bool is_done[LANES];

static void meet() { swapcontext(&lane_context[running], &main_context); }

inline void __syncwarp() { meet(); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __ballot_sync(unsigned, bool vote) {
  const int lane = running;
  const unsigned round = vote_round[lane]++ & 1;
  votes[round][lane] = vote;
  meet();
  unsigned all = 0;
  for (int other = 0; other < LANES; ++other) all |= votes[round][other] << other;
  return all;
}

// what went wrong, as bits; and what the ring reached
enum {
  MISALIGNED = 1, TOO_LARGE = 2, DEADLOCK = 4, STORES_LEFT = 8, LOADS_LEFT = 16, NOT_LANE_0 = 32, DIVERGED = 64,
  NOT_PUBLISHED = 128
};
static unsigned problems;
static unsigned long long bytes_loaded, most_under_way;

struct Load {
  void* stage;
  uint64_t from;
  uint32_t bytes;
  void* barrier;
};
struct Store {
  uint64_t to;
  const void* stage;
  uint32_t bytes;
};
struct Barrier {
  void* at;
  bool is_published;
  unsigned phase;      // completed phases
  uint32_t expected, arrived;
};
static std::vector<Barrier> barriers;
static std::deque<Load> loads;
static std::deque<Store> stores;
static uint32_t stage_limit;
// 0: nothing happens before it is waited for
static uint64_t seed;

static unsigned draw(unsigned n) {
  if (!seed) return n - 1;
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(seed >> 33) % n;
}
static Barrier* find(void* at) {
  for (Barrier& barrier : barriers)
    if (barrier.at == at) return &barrier;
  problems |= DEADLOCK;
  return nullptr;
}
static void arrive(size_t which) {
  const Load load = loads[which];
  loads.erase(loads.begin() + which);
  memcpy(load.stage, (const void*)load.from, load.bytes);
  Barrier* barrier = find(load.barrier);
  if (!barrier) return;
  barrier->arrived += load.bytes;
  if (barrier->arrived == barrier->expected) {
    barrier->phase++;
    barrier->expected = barrier->arrived = 0;
  }
}
static void finish_store() {
  const Store store = stores.front();
  stores.pop_front();
  memcpy((void*)store.to, store.stage, store.bytes);
}
static void pass_time() {
  if (running != 0) problems |= NOT_LANE_0;
  while (!loads.empty() && draw(4) == 0) arrive(draw(loads.size()));
  while (!stores.empty() && draw(6) == 0) finish_store();
}
static void check(const void* stage, uint64_t address, uint32_t bytes) {
  if ((uint64_t)stage % 16 || address % 16 || bytes % 16 || !bytes) problems |= MISALIGNED;
  if (bytes > stage_limit) problems |= TOO_LARGE;
}

typedef unsigned long long model_u64;
inline void barrier_init(model_u64* at) { barriers.push_back({at, false, 0, 0, 0}); }
inline void barrier_publish() {
  for (Barrier& barrier : barriers) barrier.is_published = true;
}
inline void barrier_expect(model_u64* at, unsigned bytes) {
  pass_time();
  if (Barrier* barrier = find(at)) {
    if (!barrier->is_published) problems |= NOT_PUBLISHED;
    // one arrival per phase: a second one while the first is open would end the wrong phase
    if (barrier->expected) problems |= DEADLOCK;
    barrier->expected = bytes;
  }
}
inline void barrier_wait(model_u64* at, unsigned parity) {
  pass_time();
  Barrier* barrier = find(at);
  if (!barrier) return;
  // passes once the phase of this parity is complete: the current one has the other parity
  while ((barrier->phase & 1) == parity) {
    size_t which = 0;
    while (which < loads.size() && loads[which].barrier != at) ++which;
    if (which == loads.size()) {
      problems |= DEADLOCK;
      return;
    }
    arrive(which);
  }
}
inline void bulk_load(void* stage, model_u64 from, unsigned bytes, model_u64* barrier) {
  pass_time();
  check(stage, from, bytes);
  memset(stage, 0xDB, stage_limit);
  loads.push_back({stage, from, bytes, barrier});
  bytes_loaded += bytes;
  model_u64 under_way = 0;
  for (const Load& load : loads) under_way += load.bytes;
  most_under_way = std::max(most_under_way, under_way);
}
inline void bulk_store(model_u64 to, const void* stage, unsigned bytes) {
  check(stage, to, bytes);
  stores.push_back({to, stage, bytes});
  pass_time();
}
template <int PENDING>
inline void bulk_wait_read() {
  while (stores.size() > (size_t)PENDING) finish_store();
}
inline void bulk_wait() {
  while (!stores.empty()) finish_store();
}

unsigned char shared[1 << 18] __attribute__((aligned(128)));

#include "bulk.cu"

struct Launch {
  bool is_gather;
  const Pair *entries, *tiles;
  const Groups* groups;
  u32 num_groups, num_units, num_stages, stage_bytes;
};
static Launch launch;

static void run_lane(int lane) {
  const Launch& l = launch;
  auto kernel = l.is_gather ? kvferry_gather_blocks : kvferry_scatter_blocks;
  kernel(l.entries, l.tiles, *l.groups, l.num_groups, l.num_units, l.num_stages, l.stage_bytes);
  is_done[lane] = true;
}

extern "C" unsigned control_bytes() { return sizeof(Control); }

// Runs every CTA of a launch, one after the other; returns the problems.
extern "C" unsigned run(int is_gather, const void* entries, const void* tiles, const void* groups, u32 num_groups,
                        u32 num_units, u32 num_stages, u32 stage_bytes, u32 grid, uint64_t random_seed,
                        unsigned long long* reached) {
  launch = {(bool)is_gather, (const Pair*)entries, (const Pair*)tiles, (const Groups*)groups,
            num_groups, num_units, num_stages, stage_bytes};
  seed = random_seed;
  problems = 0;
  bytes_loaded = most_under_way = 0;
  stage_limit = stage_bytes;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    memset(shared, 0xDB, sizeof(shared));
    barriers.clear();
    loads.clear();
    stores.clear();
    for (int lane = 0; lane < LANES; ++lane) {
      vote_round[lane] = 0;
      is_done[lane] = false;
      getcontext(&lane_context[lane]);
      lane_context[lane].uc_stack.ss_sp = stacks[lane];
      lane_context[lane].uc_stack.ss_size = STACK;
      lane_context[lane].uc_link = &main_context;
      makecontext(&lane_context[lane], (void (*)())run_lane, 1, lane);
    }
    for (bool is_over = false; !is_over;) {
      int done = 0;
      for (running = 0; running < LANES; ++running) {
        threadIdx.x = running;
        if (!is_done[running]) swapcontext(&main_context, &lane_context[running]);
        done += is_done[running];
      }
      // lanes meet the same number of times
      if (done && done != LANES) problems |= DIVERGED;
      is_over = done > 0;
    }
    if (!stores.empty()) problems |= STORES_LEFT;
    if (!loads.empty()) problems |= LOADS_LEFT;
  }
  reached[0] = bytes_loaded;
  reached[1] = most_under_way;
  return problems;
}
