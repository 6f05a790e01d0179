//! A thousand steps: nothing grows.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::tensor::Device;
use common::{DEADLINE, Stream, on_one_thread, optimizer, reference};
use shardwise_burn::ShardedModel;
use shardwise_comm::threads;
use shardwise_models::{CausalLm, Gpt2Config, LanguageModel, ModelConfig};

/// Counts the bytes of the heap that are in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's own promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's own promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What the process and one rank's engine hold.
#[derive(Debug)]
struct Held {
    resident_bytes: usize,
    heap_bytes: usize,
    descriptors: usize,
    allocations: u64,
}

impl Held {
    fn now(allocations: u64) -> Self {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
        let pages: usize = statm.split_whitespace().nth(1).expect("resident").parse().expect("a number");
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
        Self { resident_bytes: pages * 4096, heap_bytes: IN_USE.load(Relaxed), descriptors, allocations }
    }
}

/// Two ranks train a small GPT for a thousand steps of two rounds, and evaluate now and then, a different number of batches
/// each: after step 2 the engine allocates nothing, descriptors stay, and from step 100 on neither what is in use of the heap
/// nor resident memory grows by 1 %.
#[test]
fn a_thousand_steps_leave_nothing_behind() {
    let fixture = "gpt2-tiny";
    let held = threads::run(2, DEADLINE, |group| {
        on_one_thread(|| {
            let config = ModelConfig::Gpt2(Gpt2Config {
                vocab_size: 8192,
                n_positions: 32,
                n_embd: 64,
                n_layer: 2,
                n_head: 2,
                ..Gpt2Config::default()
            });
            let device = Device::flex().autodiff();
            let stream = Stream::of(fixture, reference(fixture).seq_len);
            let (shard, lr) = optimizer("adamw");
            let module = config.init(&device).expect("a valid configuration");
            let rank = group.rank();
            let mut model = ShardedModel::new(group.clone(), module, shard, &()).expect("a model");
            let mut held = Vec::new();
            for step in 1..=1000 {
                let loss = |model: &LanguageModel, m: usize| {
                    let (ids, targets) = stream.batch((step * 4 + m) % 200, 1, &device);
                    model.loss(ids, targets)
                };
                model.step(4, lr, loss).expect("a step");
                if step % 50 == 0 {
                    let evaluate = |model: &LanguageModel| {
                        for batch in 0..3 + 2 * rank {
                            let (ids, _) = stream.batch(batch, 1, &device.clone().inner());
                            model.forward(ids);
                        }
                    };
                    model.evaluate(evaluate).expect("an evaluation");
                }
                if [2, 100, 1000].contains(&step) {
                    group.barrier("measured").expect("both ranks");
                    // One at a time: looking takes a descriptor.
                    if rank == 0 {
                        held.push(Held::now(model.ledger().allocations()));
                    }
                    group.barrier("measured").expect("both ranks");
                }
            }
            held
        })
    })
    .expect("a world");
    let held = held.into_iter().next().expect("rank 0");
    let [early, warm, late] = held.try_into().expect("three moments");
    assert_eq!(early.allocations, late.allocations, "buffers of the engine");
    assert_eq!(warm.descriptors, late.descriptors);
    let growth = |late: usize, warm: usize| late as f64 / warm as f64 - 1.0;
    assert!(growth(late.heap_bytes, warm.heap_bytes) < 0.01, "{warm:?} {late:?}");
    assert!(growth(late.resident_bytes, warm.resident_bytes) < 0.01, "{warm:?} {late:?}");
}
