//! A Burn model of your own, sharded over two processes: `cargo run --release --example custom_model`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::tensor::{Device, Tensor, TensorData};
use shardwise::prelude::*;

/// One layer of the model. `Sharded<Layer>` below makes each a unit: whole only while it computes.
#[derive(Module, Debug)]
struct Layer {
    up: Linear,
    down: Linear,
}

impl Layer {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(Relu::new().forward(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
struct Net {
    input: Linear,
    layers: Vec<Sharded<Layer>>,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let layer = |_| Sharded::new(Layer { up: linear(64, 256), down: linear(256, 64) });
        Self { input: linear(2, 64), layers: (0..4).map(layer).collect(), output: linear(64, 1) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.layers.iter().fold(self.input.forward(x), |x, layer| layer.call(x, |l, x| l.forward(x)));
        self.output.forward(x)
    }
}

fn main() -> Result<(), RunError> {
    shardwise::run(2, |group| {
        let device = Device::flex().autodiff();
        let first = group.rank() == 0;
        let mut model = ShardedModel::new(group, Net::new(&device), ShardConfig::default(), &())?;
        for step in 0..200 {
            // 4 micro-batches of 32 points, two for each rank: learn y = x0 * x1.
            let outcome = model.step(4, 1e-3, |net: &Net, micro_batch| {
                let point =
                    |i: usize| ((i * 7919 + (step * 4 + micro_batch) * 104_729) % 2001) as f32 / 1000.0 - 1.0;
                let points: Vec<f32> = (0..64).map(point).collect();
                let products: Vec<f32> = points.chunks(2).map(|p| p[0] * p[1]).collect();
                let x = Tensor::<2>::from_data(TensorData::new(points, [32, 2]), &device);
                let y = Tensor::<2>::from_data(TensorData::new(products, [32, 1]), &device);
                (net.forward(x) - y).square().mean()
            })?;
            if first && step % 20 == 19 {
                println!("step {:3}  loss {:.5}", step + 1, outcome.loss);
            }
        }
        if first {
            println!("each rank held {} bytes at its peak", model.ledger().total_peak());
        }
        Ok(())
    })
}
