//! Which path an operation takes, and that the bits do not depend on how its inputs are held.

mod ops_common;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{Autodiff, AutodiffBackend, Flex};
use burn::tensor::{Bytes, DType, Device, Distribution, Shape, Tensor};
use ops_common::cases::{cases, flat};
use ops_common::{
    Array, Leaf, Mode, Random, assert_outcomes_close, bits, differentiate, differentiate_leaves, evaluate,
    ids, leaves,
};
use shardwise_burn::ops::{self, AttentionHeads, reference};

#[test]
fn the_output_has_the_same_bits_in_every_mode() {
    for case in cases(1) {
        let expected = bits(&evaluate(&case.inputs, Mode::Tracked, &case.op));
        for mode in [Mode::Constant, Mode::Plain] {
            assert_eq!(bits(&evaluate(&case.inputs, mode, &case.op)), expected, "{}, {mode:?}", case.name);
        }
    }
}

#[test]
fn runs_repeat_bit_for_bit_also_on_several_threads() {
    for case in cases(2) {
        let run = || differentiate(&case.inputs, &case.op);
        let expected = run();
        assert_eq!(run(), expected, "{}", case.name);
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(run), expected, "{} on {threads} threads", case.name);
        }
    }
}

/// A leaf whose storage is a window of a larger allocation, `offset` elements from its start.
fn leaf_in_window(array: &Array, offset: usize) -> Leaf {
    let mut storage = vec![f32::NAN; offset];
    storage.extend_from_slice(&array.values);
    storage.push(f32::NAN);
    let end = 4 * (offset + array.values.len());
    let window = Bytes::from_elems(storage).shared().view(4 * offset, end).expect("a window");
    assert_eq!(window.len(), 4 * array.values.len());
    let tensor = FlexTensor::new(window, Layout::contiguous(Shape::from(array.dims.clone())), DType::F32);
    let tensor = Autodiff::<Flex>::from_inner(tensor).require_grad();
    // The rank of this type is not checked against the tensor's.
    Leaf::new(Tensor::<1>::from_primitive::<Autodiff<Flex>>(tensor))
}

#[test]
fn windows_at_any_alignment_give_the_same_bits() {
    for case in cases(3) {
        let expected = differentiate(&case.inputs, &case.op);
        for offset in [1, 2, 3, 5, 8, 15] {
            let leaves: Vec<Leaf> = case.inputs.iter().map(|a| leaf_in_window(a, offset)).collect();
            assert_eq!(differentiate_leaves(&leaves, &case.op), expected, "{}, offset {offset}", case.name);
        }
    }
}

#[test]
fn inputs_need_not_be_contiguous() {
    let mut random = Random::new(4);
    let (x, w) = (random.array(&[5, 7]), random.array(&[3, 7]));
    let device = Mode::Plain.device();
    let transposed = w.tensor::<2>(&device).transpose();
    let copied = Tensor::<2>::from_data(transposed.to_data(), &device);
    let product = |w: Tensor<2>| ops::linear(x.tensor::<2>(&device), w, None).into_data();
    assert_eq!(product(transposed), product(copied));

    // A part of a larger tensor, in rows and in columns.
    let wide = random.array(&[4, 6, 10]).tensor::<3>(&device);
    for part in [wide.clone().narrow(0, 1, 2), wide.narrow(2, 3, 5)] {
        let copied = Tensor::<3>::from_data(part.to_data(), &device);
        assert_eq!(ops::gelu_tanh(part.clone()).into_data(), ops::gelu_tanh(copied.clone()).into_data());
        let norm = |x: Tensor<3>| {
            let gamma = Tensor::ones([x.dims()[2]], &device);
            ops::rms_norm(x, gamma, 1e-5).into_data()
        };
        assert_eq!(norm(part), norm(copied));
    }
}

#[test]
fn other_dtypes_take_burns_operations() {
    let device = Device::flex().autodiff();
    let x = Tensor::<3>::random([2, 5, 8], Distribution::Default, &device);
    let w = Tensor::<2>::random([8, 8], Distribution::Default, &device);
    let g = Tensor::<1>::random([8], Distribution::Default, &device);
    for dtype in [DType::F64, DType::BF16] {
        let (x, w, g) = (x.clone().cast(dtype), w.clone().cast(dtype), g.clone().cast(dtype));
        let heads = AttentionHeads { num_heads: 2, num_kv_heads: 1, head_dim: 4 };
        let (k, angles) = (x.clone().narrow(2, 0, 4), Tensor::<2>::ones([5, 2], &device).cast(dtype));
        let (tokens, targets) = (ids(&[0, 1, 2], [1, 3]), ids(&[0; 10], [2, 5]));
        let some = || Some(g.clone());
        let pairs = [
            (
                flat(ops::linear(x.clone(), w.clone(), some())),
                flat(reference::linear(x.clone(), w.clone(), some())),
            ),
            (
                flat(ops::linear_residual(x.clone(), w.clone(), some(), x.clone())),
                flat(reference::linear_residual(x.clone(), w.clone(), some(), x.clone())),
            ),
            (
                flat(ops::linear_transposed(x.clone(), w.clone())),
                flat(reference::linear_transposed(x.clone(), w.clone())),
            ),
            (flat(ops::gelu_tanh(x.clone())), flat(reference::gelu_tanh(x.clone()))),
            (flat(ops::silu_mul(x.clone(), x.clone())), flat(reference::silu_mul(x.clone(), x.clone()))),
            (
                flat(ops::layer_norm(x.clone(), g.clone(), some(), 1e-5)),
                flat(reference::layer_norm(x.clone(), g.clone(), some(), 1e-5)),
            ),
            (
                flat(ops::rms_norm(x.clone(), g.clone(), 1e-5)),
                flat(reference::rms_norm(x.clone(), g.clone(), 1e-5)),
            ),
            (
                flat(ops::causal_attention(x.clone(), k.clone(), k.clone(), heads)),
                flat(reference::causal_attention(x.clone(), k.clone(), k.clone(), heads)),
            ),
            (
                flat(ops::causal_attention_packed(x.clone().repeat_dim(2, 3), 2)),
                flat(reference::causal_attention_packed(x.clone().repeat_dim(2, 3), 2)),
            ),
            (
                flat(ops::rotary(x.clone(), &angles, &angles, 4)),
                flat(reference::rotary(x.clone(), &angles, &angles, 4)),
            ),
            (
                flat(ops::embedding(w.clone(), tokens.clone())),
                flat(reference::embedding(w.clone(), tokens.clone())),
            ),
            (
                flat(ops::embedding_with_positions(w.clone(), w.clone(), tokens.clone())),
                flat(reference::embedding_with_positions(w.clone(), w.clone(), tokens)),
            ),
            (ops::cross_entropy(x.clone(), targets.clone()), reference::cross_entropy(x.clone(), targets)),
        ];
        for (i, (found, expected)) in pairs.into_iter().enumerate() {
            assert_eq!(found.dtype(), dtype, "pair {i}");
            assert_eq!(found.into_data(), expected.into_data(), "pair {i}");
        }
    }
}

#[test]
fn burns_own_checkpointing_takes_burns_operations() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let x = Random::new(6).array(&[3, 40]).tensor::<2>(&device).require_grad();
    let found = ops::gelu_tanh(x.clone());
    assert_eq!(found.to_data(), reference::gelu_tanh(x.clone()).into_data());
    assert!(x.grad(&found.sum().backward()).is_some());
}

#[test]
fn constants_build_no_graph() {
    for case in cases(7) {
        let output = (case.op)(&leaves(&case.inputs, Mode::Constant));
        assert!(output.is_autodiff() && !output.is_tracked(), "{}", case.name);
    }
}

#[test]
fn each_input_alone_gets_the_gradient_it_gets_with_the_others() {
    for case in cases(8) {
        let expected = differentiate(&case.inputs, &case.op);
        for alone in 0..case.inputs.len() {
            let mode = |i| if i == alone { Mode::Tracked } else { Mode::Constant };
            let leaves: Vec<Leaf> =
                case.inputs.iter().enumerate().map(|(i, a)| Leaf::from_array(a, mode(i))).collect();
            let found = differentiate_leaves(&leaves, &case.op);
            for (i, (found, expected)) in found.gradients.iter().zip(&expected.gradients).enumerate() {
                let expected = expected.as_ref().filter(|_| i == alone);
                assert_eq!(found.as_ref(), expected, "{}: gradient {i} where {alone} is tracked", case.name);
            }
        }
    }
}

#[test]
fn a_constant_outside_autodiff_mixes_with_tracked_inputs() {
    for case in cases(9) {
        let expected = differentiate(&case.inputs, &case.op);
        for plain in 1..case.inputs.len() {
            let mode = |i| if i == plain { Mode::Plain } else { Mode::Tracked };
            let leaves: Vec<Leaf> =
                case.inputs.iter().enumerate().map(|(i, a)| Leaf::from_array(a, mode(i))).collect();
            let found = differentiate_leaves(&leaves, &case.op);
            assert_eq!(bits(&found.output), bits(&expected.output), "{}", case.name);
            assert_eq!(found.gradients[0], expected.gradients[0], "{}", case.name);
        }
    }
}

/// A transformer block and a loss: gradients meet at the residual stream, where none may be written in place.
#[test]
fn a_block_of_all_operations_agrees_with_burn() {
    let heads = AttentionHeads { num_heads: 4, num_kv_heads: 2, head_dim: 6 };
    let mut random = Random::new(10);
    let tables: [&[usize]; 4] = [&[11, 24], &[9, 24], &[24], &[24]];
    let weights: [&[usize]; 8] =
        [&[24, 24], &[24, 12], &[24, 12], &[24, 24], &[24], &[24, 40], &[24, 40], &[40, 24]];
    let inputs: Vec<Array> = tables.into_iter().chain(weights).map(|dims| random.array(dims)).collect();
    let [cos, sin] =
        [1, 2].map(|seed| Random::new(seed).array(&[7, 3]).tensor::<2>(&Mode::Constant.device()));
    let tokens = ids(&random.ids(14, 11), [2, 7]);
    let targets = ids(&random.ids(14, 11), [2, 7]);

    let fused = differentiate(&inputs, |i| {
        let x = ops::embedding_with_positions(i[0].get(), i[1].get(), tokens.clone());
        let n = ops::layer_norm(x.clone(), i[2].get(), Some(i[3].get()), 1e-5);
        let q = ops::rotary(ops::linear(n.clone(), i[4].get(), None), &cos, &sin, 6);
        let k = ops::rotary(ops::linear(n.clone(), i[5].get(), None), &cos, &sin, 6);
        let o = ops::causal_attention(q, k, ops::linear(n, i[6].get(), None), heads);
        let x = ops::linear_residual(o, i[7].get(), None, x);
        let n = ops::rms_norm(x.clone(), i[8].get(), 1e-5);
        let h = ops::silu_mul(ops::linear(n.clone(), i[9].get(), None), ops::linear(n, i[10].get(), None));
        let x = ops::gelu_tanh(ops::linear_residual(h, i[11].get(), None, x.clone())) + x;
        ops::cross_entropy(ops::linear_transposed(x, i[0].get()), targets.clone())
    });
    let burn = differentiate(&inputs, |i| {
        let x = reference::embedding_with_positions(i[0].get(), i[1].get(), tokens.clone());
        let n = reference::layer_norm(x.clone(), i[2].get(), Some(i[3].get()), 1e-5);
        let q = reference::rotary(reference::linear(n.clone(), i[4].get(), None), &cos, &sin, 6);
        let k = reference::rotary(reference::linear(n.clone(), i[5].get(), None), &cos, &sin, 6);
        let o = reference::causal_attention(q, k, reference::linear(n, i[6].get(), None), heads);
        let x = reference::linear_residual(o, i[7].get(), None, x);
        let n = reference::rms_norm(x.clone(), i[8].get(), 1e-5);
        let h = reference::silu_mul(
            reference::linear(n.clone(), i[9].get(), None),
            reference::linear(n, i[10].get(), None),
        );
        let x = reference::gelu_tanh(reference::linear_residual(h, i[11].get(), None, x.clone())) + x;
        reference::cross_entropy(reference::linear_transposed(x, i[0].get()), targets.clone())
    });
    assert_outcomes_close("block", &fused, &burn, 1e-5);
}

#[test]
#[should_panic(expected = "id 7 is out of range: the embedding has 7 rows")]
fn an_id_beyond_the_table_is_refused() {
    let table = Random::new(11).array(&[7, 3]).tensor(&Mode::Plain.device());
    ops::embedding(table, ids(&[0, 7], [1, 2]));
}

#[test]
#[should_panic(expected = "index -1 is out of range")]
fn a_negative_id_is_refused() {
    let table = Random::new(11).array(&[7, 3]).tensor(&Mode::Plain.device());
    ops::embedding(table, ids(&[0, -1], [1, 2]));
}

#[test]
#[should_panic(expected = "target 5 is out of range: the logits have 5 classes")]
fn a_target_beyond_the_classes_is_refused() {
    let logits = Random::new(11).array(&[2, 5]).tensor::<2>(&Mode::Plain.device());
    ops::cross_entropy(logits, ids(&[0, 5], [2]));
}

#[test]
#[should_panic(expected = "the input has 6 columns, the weight takes 4")]
fn an_input_that_does_not_fit_the_weight_is_refused() {
    let device = Mode::Plain.device();
    let mut random = Random::new(11);
    ops::linear(random.array(&[2, 6]).tensor::<2>(&device), random.array(&[4, 3]).tensor(&device), None);
}
