//! The order of additions: one tree for every number of ranks.

use proptest::prelude::*;
use shardwise_core::{CarryCounter, max_partials};

/// Sums as the engine does: a tree over the ranks of each round, then the counter over rounds. Returns the expression.
fn expression(micro_batches: usize, ranks: usize) -> String {
    let tree = |items: Vec<String>| {
        let mut counter = CarryCounter::default();
        for item in items {
            counter.push(item, 1, |older, newer| format!("({older}+{newer})"));
        }
        counter.finish(|larger, smaller| format!("({larger}+{smaller})")).expect("at least one item")
    };
    let mut counter = CarryCounter::default();
    for round in 0..micro_batches / ranks {
        let item = tree((0..ranks).map(|r| format!("{}", round * ranks + r)).collect());
        match counter.take_lowest() {
            Some(older) => counter.push(format!("({older}+{item})"), 2, |o, n| format!("({o}+{n})")),
            None => counter.push(item, 1, |o, n| format!("({o}+{n})")),
        }
    }
    counter.finish(|larger, smaller| format!("({larger}+{smaller})")).expect("at least one round")
}

#[test]
fn eight_micro_batches_form_the_balanced_tree() {
    assert_eq!(expression(8, 1), "(((0+1)+(2+3))+((4+5)+(6+7)))");
}

#[test]
fn leftovers_merge_smallest_first() {
    assert_eq!(expression(7, 1), "(((0+1)+(2+3))+((4+5)+6))");
    assert_eq!(expression(3, 3), "((0+1)+2)");
}

#[test]
fn the_tree_does_not_depend_on_a_power_of_two_of_ranks() {
    for micro_batches in 1..=40 {
        let one = expression(micro_batches, 1);
        for ranks in [2, 4, 8] {
            if micro_batches % ranks == 0 {
                assert_eq!(
                    expression(micro_batches, ranks),
                    one,
                    "{micro_batches} micro-batches, {ranks} ranks"
                );
            }
        }
    }
}

proptest! {
    /// The counter never holds more partial sums than the plan allows for, and needs that many.
    #[test]
    fn partials_stay_within_the_bound(items in 1usize..300) {
        let mut counter = CarryCounter::default();
        let mut most = 0;
        for _ in 0..items {
            match counter.take_lowest() {
                Some(sum) => counter.push(sum + 1, 2, |a, b| a + b),
                None => counter.push(1usize, 1, |a, b| a + b),
            }
            most = most.max(counter.partials());
        }
        prop_assert_eq!(most, max_partials(items));
        prop_assert_eq!(counter.finish(|a, b| a + b), Some(items));
    }
}
