//! What the operations allocate, counted by the allocator: no leak, and one buffer of logits.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Distribution, Int, Tensor};
use shardwise_burn::ops;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Counts are of the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counters are atomic.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn random<const D: usize>(dims: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(dims, Distribution::Uniform(-1.0, 1.0), device)
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    Tensor::<1, Int>::arange(0..64, device).reshape([2, 32])
}

/// A small model with an operation of each kind that keeps state.
fn loss(device: &Device, tracked: bool) -> Tensor<1> {
    let leaf = |dims: [usize; 2]| random(dims, device).set_require_grad(tracked);
    let row = |width: usize| random([width], device).set_require_grad(tracked);
    let table = leaf([1000, 24]);
    let x = ops::embedding_with_positions(table.clone(), leaf([40, 24]), tokens(device));
    let n = ops::layer_norm(x.clone(), row(24), Some(row(24)), 1e-5);
    let o = ops::causal_attention_packed(ops::linear(n, leaf([24, 72]), Some(row(72))), 4);
    let x = ops::linear_residual(o, leaf([24, 24]), None, x);
    let h = ops::gelu_tanh(ops::linear(ops::rms_norm(x.clone(), row(24), 1e-5), leaf([24, 96]), None));
    let x = ops::linear_residual(h, leaf([96, 24]), None, x);
    ops::cross_entropy(ops::linear_transposed(x, table), tokens(device))
}

/// The live bytes after `count` runs on one thread (each thread that multiplies matrices keeps a buffer).
fn live_after(count: usize, run: impl Fn() + Sync) -> usize {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| (0..count).for_each(|_| run()));
    drop(pool);
    LIVE.load(Relaxed)
}

#[test]
fn steps_leave_nothing_behind() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::flex().autodiff();
    for tracked in [true, false] {
        let run = || {
            let loss = loss(&device, tracked);
            if tracked {
                drop(loss.backward());
            }
        };
        let first = live_after(20, run);
        let later = live_after(200, run);
        // Tables of Burn's may still grow a little; a leak of 50 bytes a run would show.
        assert!(
            later < first + 10_000,
            "tracked {tracked}: {first} bytes after 20 runs, {later} after 200 more"
        );
    }
}

/// The head of a language model is its memory peak: logits are by far the largest tensor.
#[test]
fn the_head_holds_one_buffer_of_logits() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (rows, width, vocabulary) = (64, 16, 20_000);
    let logits = 4 * rows * vocabulary;
    let device = Device::flex().autodiff();
    let x = random([2, 32, width], &device).require_grad();
    for tied in [false, true] {
        let weight =
            random(if tied { [vocabulary, width] } else { [width, vocabulary] }, &device).require_grad();
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let y = match tied {
            true => ops::linear_transposed(x.clone(), weight.clone()),
            false => ops::linear(x.clone(), weight.clone(), None),
        };
        let gradients = ops::cross_entropy(y, tokens(&device)).backward();
        let peak = PEAK.load(Relaxed) - before;
        // The weight's gradient is a quarter of the logits here; the product packs some of its operands.
        assert!(
            peak < logits + logits / 4 + 6_000_000,
            "tied {tied}: {peak} bytes at the peak, logits are {logits}"
        );
        drop(gradients);
    }
}
