//! The loss of a large vocabulary holds one buffer of logits, forward and backward.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use shardwise_models::{CausalLm, Gpt2Config, LlamaConfig, ModelConfig};

/// Counts what is allocated, and the most of it.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = ALLOCATED.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(now, Relaxed);
        // SAFETY: the caller's own promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's own promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const VOCAB: usize = 8192;
const LEN: usize = 256;
const BATCH: usize = 2;

#[test]
fn one_buffer_of_logits_is_held() {
    let gpt2 = Gpt2Config {
        vocab_size: VOCAB,
        n_positions: LEN,
        n_embd: 16,
        n_layer: 1,
        n_head: 2,
        ..Gpt2Config::default()
    };
    let llama = LlamaConfig {
        vocab_size: VOCAB,
        max_position_embeddings: LEN,
        hidden_size: 16,
        intermediate_size: Some(32),
        num_hidden_layers: 1,
        num_attention_heads: 2,
        ..LlamaConfig::default()
    };
    let device = Device::flex().autodiff();
    let tokens: Vec<i64> = (0..BATCH * LEN).map(|i| (i * 31 % VOCAB) as i64).collect();
    let ids = Tensor::from_data(TensorData::new(tokens, [BATCH, LEN]), &device);
    for config in [ModelConfig::Gpt2(gpt2), ModelConfig::Llama(llama)] {
        let model = config.init(&device).expect("a valid configuration").materialize();
        let step = || drop(model.loss(ids.clone(), ids.clone()).backward());
        // What is set up once is not counted.
        step();
        let before = ALLOCATED.load(Relaxed);
        PEAK.store(before, Relaxed);
        step();
        let logits = BATCH * LEN * VOCAB * size_of::<f32>();
        let held = (PEAK.load(Relaxed) - before) as f64 / logits as f64;
        println!("{}: {held:.2} buffers of logits", config.family());
        assert!(held < 1.3, "{}: {held}", config.family());
    }
}
