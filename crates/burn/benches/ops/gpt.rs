//! A training step of the benchmark GPT without its optimizer: 13.9 million parameters, 2 sequences of 256 tokens.

use std::sync::{Arc, Mutex};

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use shardwise_burn::ops::{self, reference};
use shardwise_burn::sink::{self, GradSink, SinkGuard, WriteMode};

use super::medians;

const VOCABULARY: usize = 4096;
const WIDTH: usize = 384;
const BLOCKS: usize = 6;
const HEADS: usize = 6;
const CONTEXT: usize = 256;
const BATCH: usize = 2;
const EPS: f64 = 1e-5;

#[derive(Module, Debug)]
struct Block {
    ln1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    ln2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
}

#[derive(Module, Debug)]
struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    lnf: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(device: &Device) -> Self {
        let linear = |d_in, d_out| LinearConfig::new(d_in, d_out).init(device);
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block {
            ln1: norm(),
            qkv: linear(WIDTH, 3 * WIDTH),
            proj: linear(WIDTH, WIDTH),
            ln2: norm(),
            fc1: linear(WIDTH, 4 * WIDTH),
            fc2: linear(4 * WIDTH, WIDTH),
        };
        Self {
            wte: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            wpe: EmbeddingConfig::new(CONTEXT, WIDTH).init(device),
            blocks: (0..BLOCKS).map(block).collect(),
            lnf: norm(),
            head: LinearConfig::new(WIDTH, VOCABULARY).with_bias(false).init(device),
        }
    }

    fn fused_loss(&self, ids: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let norm = |ln: &LayerNorm, x: Tensor<3>| {
            ops::layer_norm(x, ln.gamma.val(), ln.beta.as_ref().map(Param::val), EPS)
        };
        let linear =
            |l: &Linear, x: Tensor<3>| ops::linear(x, l.weight.val(), l.bias.as_ref().map(Param::val));
        let add = |l: &Linear, x: Tensor<3>, residual: Tensor<3>| {
            ops::linear_residual(x, l.weight.val(), l.bias.as_ref().map(Param::val), residual)
        };
        let mut x = ops::embedding_with_positions(self.wte.weight.val(), self.wpe.weight.val(), ids);
        for block in &self.blocks {
            let qkv = linear(&block.qkv, norm(&block.ln1, x.clone()));
            x = add(&block.proj, ops::causal_attention_packed(qkv, HEADS), x);
            let hidden = ops::gelu_tanh(linear(&block.fc1, norm(&block.ln2, x.clone())));
            x = add(&block.fc2, hidden, x);
        }
        ops::cross_entropy(linear(&self.head, norm(&self.lnf, x)), targets)
    }

    fn burn_loss(&self, ids: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let positions = self.wpe.weight.val().unsqueeze();
        let mut x = self.wte.forward(ids) + positions;
        for block in &self.blocks {
            let qkv = block.qkv.forward(block.ln1.forward(x.clone()));
            x = x + block.proj.forward(reference::causal_attention_packed(qkv, HEADS));
            let hidden = reference::gelu_tanh(block.fc1.forward(block.ln2.forward(x.clone())));
            x = x + block.fc2.forward(hidden);
        }
        reference::cross_entropy(self.head.forward(self.lnf.forward(x)), targets)
    }
}

/// A parameter's gradient as an engine keeps it: allocated once.
#[derive(Debug)]
struct Window(Mutex<Vec<f32>>);

impl GradSink for Window {
    fn accumulate(&self, write: &mut dyn FnMut(&mut [f32], WriteMode)) {
        write(&mut self.0.lock().expect("no writer panics"), WriteMode::Overwrite);
    }
}

/// Registers a window for every parameter it visits.
struct Windows(Vec<SinkGuard>);

impl ModuleVisitor for Windows {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        let window = Window(Mutex::new(vec![0.0; tensor.shape().num_elements()]));
        let node =
            tensor.try_into_primitive::<Autodiff<Flex>>().expect("a parameter on the autodiff backend").id();
        self.0.push(sink::register(node, Arc::new(window)));
    }
}

pub(super) fn run() {
    let device = Device::flex().autodiff();
    let gpt = Gpt::new(&device);
    let tokens = |shift: usize| -> Tensor<2, Int> {
        let ids: Vec<i64> = (0..BATCH * CONTEXT).map(|i| ((i + shift) * 7919 % VOCABULARY) as i64).collect();
        Tensor::from_data(TensorData::new(ids, [BATCH, CONTEXT]), &device)
    };
    let (ids, targets) = (tokens(0), tokens(1));
    let mut forward = || drop(gpt.clone().no_grad().fused_loss(ids.clone(), targets.clone()).into_data());
    let mut fused = || drop(gpt.fused_loss(ids.clone(), targets.clone()).backward());
    let sharded = Gpt::new(&device);
    let mut windows = Windows(Vec::new());
    sharded.visit(&mut windows);
    let mut with_sinks = || drop(sharded.fused_loss(ids.clone(), targets.clone()).backward());
    let mut burn = || drop(gpt.burn_loss(ids.clone(), targets.clone()).backward());
    let loss = [gpt.fused_loss(ids.clone(), targets.clone()), gpt.burn_loss(ids.clone(), targets.clone())];
    println!(
        "loss: fused {}, Burn {}",
        loss[0].clone().into_scalar::<f32>(),
        loss[1].clone().into_scalar::<f32>()
    );
    loss.iter().for_each(|loss| drop(loss.backward()));
    let [forward, fused, with_sinks, burn] =
        medians(15, [&mut forward, &mut fused, &mut with_sinks, &mut burn]);
    println!("fused forward, untracked            {forward:.4} s");
    println!("fused forward and backward          {fused:.4} s   {:.2} of Burn's", fused / burn);
    println!("the same, gradients into sinks      {with_sinks:.4} s   {:.2} of Burn's", with_sinks / burn);
    println!("Burn forward and backward           {burn:.4} s");
}
