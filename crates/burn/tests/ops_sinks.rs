//! Where a parameter has a sink, its gradient goes there, and nothing is registered with Burn.

mod ops_common;

use std::sync::Arc;

use ops_common::cases::{Case, cases, flat};
use ops_common::{
    Leaf, Mode, Window, assert_close, bits, differentiate, differentiate_leaves, ids, leaves, node,
};

use shardwise_burn::ops;
use shardwise_burn::sink::{self, SinkGuard};

/// A window for every parameter of the case.
fn windows(case: &Case) -> Vec<Arc<Window>> {
    case.parameters.iter().map(|&p| Window::new(case.inputs[p].values.len())).collect()
}

fn register(leaves: &[Leaf], parameters: &[usize], windows: &[Arc<Window>]) -> Vec<SinkGuard> {
    let pairs = parameters.iter().zip(windows);
    pairs.map(|(&p, window)| sink::register(node(&leaves[p]), window.clone())).collect()
}

#[test]
fn a_first_use_overwrites_with_the_bits_that_burn_would_get() {
    for case in cases(1) {
        let expected = differentiate(&case.inputs, &case.op);
        let windows = windows(&case);
        let leaves = leaves(&case.inputs, Mode::Tracked);
        let _guards = register(&leaves, &case.parameters, &windows);
        let found = differentiate_leaves(&leaves, &case.op);
        assert_eq!(bits(&found.output), bits(&expected.output), "{}", case.name);
        for (i, expected) in expected.gradients.iter().enumerate() {
            match case.parameters.iter().position(|&p| p == i) {
                Some(p) => {
                    assert_eq!(
                        found.gradients[i], None,
                        "{}: gradient {i} was registered with Burn",
                        case.name
                    );
                    assert_eq!(windows[p].written(), *expected, "{}: gradient {i}", case.name);
                }
                None => assert_eq!(found.gradients[i], *expected, "{}: gradient {i}", case.name),
            }
        }
    }
}

#[test]
fn a_further_use_adds() {
    for (case, other) in cases(1).into_iter().zip(cases(2)) {
        let windows = windows(&case);
        let mut expected: Vec<Vec<f32>> = windows.iter().map(|_| Vec::new()).collect();
        for case in [&case, &other] {
            let alone = differentiate(&case.inputs, &case.op);
            for (sum, &p) in expected.iter_mut().zip(&case.parameters) {
                let gradient = alone.gradients[p].as_ref().unwrap();
                sum.resize(gradient.len(), 0.0);
                sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += g);
            }
            let leaves = leaves(&case.inputs, Mode::Tracked);
            let _guards = register(&leaves, &case.parameters, &windows);
            differentiate_leaves(&leaves, &case.op);
        }
        for (window, expected) in windows.iter().zip(&expected) {
            let found = window.written().unwrap();
            if case.name.starts_with("embedding") {
                // Its rows are added one by one.
                assert_close(case.name, &found, expected, 2e-6);
            } else {
                assert_eq!(found, *expected, "{}", case.name);
            }
        }
    }
}

#[test]
fn an_embedding_tied_to_the_head_gets_both_gradients() {
    let mut random = ops_common::Random::new(3);
    let inputs = [random.array(&[13, 7])];
    let tokens = ids(&random.ids(10, 13), [2, 5]);
    let targets = ids(&random.ids(10, 13), [2, 5]);
    let op = |i: &[Leaf]| {
        let x = ops::gelu_tanh(ops::embedding(i[0].get(), tokens.clone()));
        ops::cross_entropy(ops::linear_transposed(x, i[0].get()), targets.clone())
    };
    let expected = differentiate(&inputs, op);
    let leaves = leaves(&inputs, Mode::Tracked);
    let window = Window::new(13 * 7);
    let _guard = sink::register(node(&leaves[0]), window.clone());
    let found = differentiate_leaves(&leaves, op);
    assert_eq!(found.gradients, [None]);
    assert_close("tied", &window.written().unwrap(), expected.gradients[0].as_ref().unwrap(), 2e-6);
}

#[test]
fn a_sink_found_in_forward_serves_backward_though_its_registration_has_ended() {
    let mut random = ops_common::Random::new(4);
    let inputs = [random.array(&[5, 3]), random.array(&[3, 2])];
    let leaves = leaves(&inputs, Mode::Tracked);
    let window = Window::new(6);
    let op = |i: &[Leaf]| {
        let _guard = sink::register(node(&i[1]), window.clone());
        flat(ops::linear(i[0].get::<2>(), i[1].get(), None))
    };
    assert_eq!(differentiate_leaves(&leaves, op).gradients[1], None);
    assert!(window.written().is_some());
    assert_eq!(Arc::strong_count(&window), 1, "the operation has let go of the sink");

    let again = differentiate_leaves(&leaves, |i| flat(ops::linear(i[0].get::<2>(), i[1].get(), None)));
    assert!(again.gradients[1].is_some(), "without a sink the gradient goes to Burn");
}

#[test]
fn a_parameter_that_needs_no_gradient_leaves_its_sink_alone() {
    for case in cases(5) {
        let windows = windows(&case);
        let leaves = leaves(&case.inputs, Mode::Constant);
        let _guards = register(&leaves, &case.parameters, &windows);
        drop((case.op)(&leaves));
        assert!(windows.iter().all(|w| w.written().is_none() && Arc::strong_count(w) == 2), "{}", case.name);
    }
}
