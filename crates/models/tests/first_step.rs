//! The first loss and gradient of both fixtures, in plain Burn without any sharding, against PyTorch in float64.

mod common;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor};
use common::{FIXTURES, Stream, data, reference, whole_model};
use shardwise_models::CausalLm;

struct SquareSum<'a> {
    gradients: &'a Gradients,
    sum: f64,
}

impl ModuleVisitor for SquareSum<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients).expect("every parameter is used");
        self.sum += gradient.into_data().iter::<f64>().map(|g| g * g).sum::<f64>();
    }
}

#[test]
fn the_first_step_is_pytorchs() {
    let device = Device::flex().autodiff();
    for fixture in FIXTURES {
        let reference = reference(fixture);
        let model = whole_model(&data(fixture), &device);
        let stream = Stream::of(fixture, reference.seq_len);
        let (ids, targets) = stream.batch(0, reference.global_batch, &device);
        let loss = model.loss(ids, targets);
        let value = loss.clone().into_scalar::<f64>();
        let gradients = loss.backward();
        let mut squares = SquareSum { gradients: &gradients, sum: 0.0 };
        model.visit(&mut squares);

        let want = &reference.runs["adamw.float64"].steps[0];
        let [loss_error, norm_error] = [(value, want.loss), (squares.sum.sqrt(), want.grad_norm)]
            .map(|(found, wanted)| (found - wanted).abs() / wanted);
        println!("{fixture}: relative errors: loss {loss_error:.1e}, gradient norm {norm_error:.1e}");
        assert!(loss_error < 1e-5 && norm_error < 1e-5, "{fixture}: {loss_error:e} {norm_error:e}");
    }
}

/// The last position's logits are a row of all logits, tracked or not.
#[test]
fn the_last_logits_are_the_last_of_all() {
    for fixture in FIXTURES {
        let reference = reference(fixture);
        let stream = Stream::of(fixture, reference.seq_len);
        let logits = [Device::flex(), Device::flex().autodiff()].map(|device| {
            let model = whole_model(&data(fixture), &device);
            let (ids, _) = stream.batch(3, 2, &device);
            let all = model.forward(ids.clone());
            assert_eq!(all.dims(), [2, reference.seq_len, model.vocab_size()]);
            let of_last: Tensor<2> = all.narrow(1, reference.seq_len - 1, 1).squeeze_dim(1);
            let last = model.last_logits(ids);
            assert_eq!(last.dims(), [2, model.vocab_size()]);
            let difference = (last.clone() - of_last).abs().max().into_scalar::<f32>();
            assert!(difference < 1e-6, "{fixture}: {difference}");
            last.into_data().iter::<f32>().collect::<Vec<_>>()
        });
        assert_eq!(logits[0], logits[1], "{fixture}");
    }
}
