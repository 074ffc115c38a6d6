// Copy blocks of a paged KV cache into frames (gather) or out of them (scatter) through shared memory, with
// the bulk copy engine of sm_90 and later: one instruction moves a whole tile, and no data passes through
// registers. Frames may lie in registered host memory: bytes in flight are bounded by shared memory, so one
// CTA of one warp can keep a link busy. The tables are those of table.py.
//
//   unit     = one tile of one entry's block; unit u of this CTA = blockIdx.x + u * gridDim.x
//   32 lanes   look up the next 32 units at once, a batch ahead, and queue those that are no holes
//   lane 0     drives the ring:
//
//        global --load--> stage --store--> global          stages, all used in turn
//                |<---------- in the ring ---------->|
//                 loads under way      stores that may still be reading their stage
//                 (at most stages - PENDING)             (at most PENDING)
//
// A load may overwrite a stage once the store that read it is done reading. Loads are numbered 0, 1, 2, ...;
// load n goes into the stage of load n - stages. It is issued when at most stages - PENDING - 1 loads are
// under way, so store n - stages has at least PENDING younger ones, and waiting until no more than PENDING
// are left waits for it.
//
// Every address and size is a multiple of 16 bytes; the launcher sees to it.

typedef unsigned int u32;
typedef unsigned long long u64;

#define MAX_STAGES 32
#define MAX_GROUPS 16

// stores that may still read their stages. A gather's stores go to the host and are slow to be read; a
// scatter's go to device memory, and the room is better spent on loads
#define GATHER_PENDING 4
#define SCATTER_PENDING 2

static const u32 BLOCK_MASK = (1u << 28) - 1;

struct Group {
  u32 first_unit, first_entry, first_tile, tiles;
};

struct Groups {
  Group row[MAX_GROUPS];
};

struct __align__(16) Pair {
  u64 first, second;
};

struct Move {
  u64 from, to;
  u32 bytes;
};

// what lies behind the ring in shared memory
struct Control {
  u64 full[MAX_STAGES];     // completes when the bytes of a load have arrived
  u64 target[MAX_STAGES];   // where a stage's bytes go
  u32 bytes[MAX_STAGES];
  Move queue[32];
};

// the test of the ring compiles this file for the host, with primitives of its own
#ifndef KVFERRY_BULK_MODEL

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// makes initialised barriers known to the bulk copy engine
__device__ __forceinline__ void barrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  u32 is_complete;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_complete) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!is_complete);
}

__device__ __forceinline__ void bulk_load(void* stage, u64 from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(stage)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(u64 to, const void* stage, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(to), "r"(shared_address(stage)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// until at most PENDING stores have yet to read their stages
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// until all stores are done
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif  // KVFERRY_BULK_MODEL

// one unit's row of both tables, as loaded: only what is used. A register that a load fills but nobody
// reads would be taken for something else at once, and that would wait for the load
struct Lookup {
  u32 block, bytes;
  u64 address, offset;
  Pair base_stride;
};

__device__ __forceinline__ Lookup look_up(const Pair* __restrict__ entries,  // [N] block and address
                                          const Pair* __restrict__ tiles,    // [T, 2] base, stride, offset, bytes
                                          const Groups& groups, u32 num_groups, u32 num_units, u32 unit) {
  Lookup found = {};
  found.block = BLOCK_MASK;
  if (unit < num_units) {
    u32 group = 0;
    while (group + 1 < num_groups && unit >= groups.row[group + 1].first_unit) ++group;
    const Group row = groups.row[group];
    const u32 number = (unit - row.first_unit) / row.tiles;
    const Pair* entry = entries + row.first_entry + number;
    const Pair* tile = tiles + 2 * (u64)(row.first_tile + (unit - row.first_unit - number * row.tiles));
    // the lower halves: block id and size
    found.block = *(const u32*)&entry->first;
    found.address = entry->second;
    found.base_stride = tile[0];
    found.offset = tile[1].first;
    found.bytes = *(const u32*)&tile[1].second;
  }
  return found;
}

template <bool GATHER>
__device__ __forceinline__ Move resolve(const Lookup& found) {
  const u32 block = found.block & BLOCK_MASK;
  const u64 cache = found.base_stride.first + block * found.base_stride.second;
  const u64 frame = found.address + found.offset;
  // all bits of a hole's block are set: nothing moves
  const u32 bytes = block == BLOCK_MASK ? 0 : found.bytes;
  return GATHER ? Move{cache, frame, bytes} : Move{frame, cache, bytes};
}

// the ring as lane 0 sees it
template <int PENDING>
struct Ring {
  unsigned char* stages;
  Control* control;
  u32 num_stages, stage_bytes;
  u32 load_stage, store_stage, parity, under_way, is_wrapped;

  // store the oldest load's bytes
  __device__ __forceinline__ void drain() {
    barrier_wait(&control->full[store_stage], parity);
    // written and read by the bulk copy engine alone: no fence between
    bulk_store(control->target[store_stage], stages + store_stage * stage_bytes,
               control->bytes[store_stage]);
    --under_way;
    if (++store_stage == num_stages) {
      store_stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void push(const Move& move) {
    if (under_way == num_stages - PENDING) drain();
    if (is_wrapped) bulk_wait_read<PENDING>();
    control->target[load_stage] = move.to;
    control->bytes[load_stage] = move.bytes;
    u64* barrier = &control->full[load_stage];
    barrier_expect(barrier, move.bytes);
    bulk_load(stages + load_stage * stage_bytes, move.from, move.bytes, barrier);
    ++under_way;
    if (++load_stage == num_stages) {
      load_stage = 0;
      is_wrapped = 1;
    }
  }
};

template <bool GATHER, int PENDING>
__device__ __forceinline__ void copy_blocks(const Pair* entries, const Pair* tiles, const Groups& groups,
                                            u32 num_groups, u32 num_units, u32 num_stages, u32 stage_bytes,
                                            unsigned char* shared) {
  Control* control = (Control*)(shared + num_stages * stage_bytes);
  const u32 lane = threadIdx.x, step = gridDim.x;
  Ring<PENDING> ring = {shared, control, num_stages, stage_bytes, 0, 0, 0, 0, 0};
  if (lane == 0) {
#pragma unroll 1
    for (u32 stage = 0; stage < num_stages; ++stage) barrier_init(&control->full[stage]);
    barrier_publish();
  }
  u32 unit = blockIdx.x + lane * step;
  Lookup found = look_up(entries, tiles, groups, num_groups, num_units, unit);
  for (u32 first = blockIdx.x; first < num_units; first += 32 * step) {
    const Move move = resolve<GATHER>(found);
    // of the next batch: answered while lane 0 is busy with this one
    unit += 32 * step;
    found = look_up(entries, tiles, groups, num_groups, num_units, unit);
    const u32 moving = __ballot_sync(0xffffffffu, move.bytes != 0);
    if (move.bytes) control->queue[__popc(moving & ((1u << lane) - 1))] = move;
    __syncwarp();
    if (lane == 0) {
      const u32 count = __popc(moving);
      for (u32 index = 0; index < count; ++index) ring.push(control->queue[index]);
    }
    // the queue is read before it is written again
    __syncwarp();
  }
  if (lane == 0) {
    while (ring.under_way) ring.drain();
    // shared memory must outlive the reads of it, and the bytes the kernel's end
    bulk_wait();
  }
}

#define KERNEL(NAME, GATHER, PENDING)                                                                     \
  extern "C" __global__ void __launch_bounds__(32, 1)                                                     \
      NAME(const Pair* __restrict__ entries, const Pair* __restrict__ tiles,                              \
           const __grid_constant__ Groups groups, u32 num_groups, u32 num_units, u32 num_stages,          \
           u32 stage_bytes) {                                                                             \
    extern __shared__ __align__(128) unsigned char shared[];                                              \
    copy_blocks<GATHER, PENDING>(entries, tiles, groups, num_groups, num_units, num_stages, stage_bytes,  \
                                 shared);                                                                 \
  }

KERNEL(kvferry_gather_blocks, true, GATHER_PENDING)
KERNEL(kvferry_scatter_blocks, false, SCATTER_PENDING)
