//! The flat layout: equal to PyTorch's shard tables, and its own algebra for any shapes and any number of ranks.

use proptest::prelude::*;
use shardwise_core::{DType, FlatLayout, LayoutError, ParamSpec, ShardMetadata};

fn specs(shapes: &[Vec<usize>]) -> Vec<ParamSpec> {
    shapes.iter().enumerate().map(|(i, s)| ParamSpec::f32(format!("p{i}"), i as u64, s.clone())).collect()
}

fn layout(shapes: &[Vec<usize>], world: usize) -> FlatLayout {
    FlatLayout::build("unit", &specs(shapes), world).expect("a valid list")
}

/// Every rank of every case of `shard_tables.json`: numel, padding, values, names, numels and closed intervals.
#[test]
fn equals_the_reference_shard_tables() {
    let table: serde_json::Value =
        serde_json::from_str(include_str!("data/shard_tables.json")).expect("valid JSON");
    let cases = table["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 48);
    for case in cases {
        let shapes: Vec<Vec<usize>> = serde_json::from_value(case["shapes"].clone()).expect("shapes");
        let world = case["world_size"].as_u64().expect("world size") as usize;
        let layout = layout(&shapes, world);
        for (rank, want) in case["ranks"].as_array().expect("ranks").iter().enumerate() {
            let context = format!("shapes {shapes:?}, rank {rank} of {world}");
            let range = layout.shard_range(rank);
            assert_eq!(layout.shard_numel() as u64, want["shard_numel"], "{context}");
            assert_eq!((layout.shard_numel() - range.len()) as u64, want["shard_numel_padded"], "{context}");
            let values: Vec<f64> = serde_json::from_value(want["values"].clone()).expect("values");
            let own: Vec<f64> = range.clone().map(|i| i as f64).collect();
            assert_eq!(own, values[..own.len()], "{context}");
            assert!(values[own.len()..].iter().all(|&v| v == 0.0), "{context}: padding is zero");
            let meta = layout.shard_metadata(rank);
            let got: Vec<_> = meta
                .params
                .iter()
                .map(|p| {
                    (p.path.clone(), p.numel as u64, *p.elements.start() as u64, *p.elements.end() as u64)
                })
                .collect();
            let names: Vec<String> = serde_json::from_value(want["param_names"].clone()).expect("names");
            let numels: Vec<u64> = serde_json::from_value(want["param_numels"].clone()).expect("numels");
            let offsets: Vec<(u64, u64)> =
                serde_json::from_value(want["param_offsets"].clone()).expect("offsets");
            let expected: Vec<_> =
                names.into_iter().zip(numels).zip(offsets).map(|((n, k), (s, e))| (n, k, s, e)).collect();
            assert_eq!(got, expected, "{context}");
        }
    }
}

/// Reference test 1: three 10x10 weights cut at given intervals; an end past the data is clipped.
#[test]
fn intervals_of_three_square_weights() {
    let layout = layout(&[vec![10, 10], vec![10, 10], vec![10, 10]], 1);
    /// A parameter with the first and last of its elements.
    type Part = (&'static str, usize, usize);
    let cases: &[(usize, usize, &[Part])] = &[
        (50, 149, &[("p0", 50, 99), ("p1", 0, 49)]),
        (0, 0, &[("p0", 0, 0)]),
        (99, 199, &[("p0", 99, 99), ("p1", 0, 99)]),
        (299, 299, &[("p2", 99, 99)]),
        (100, 1000, &[("p1", 0, 99), ("p2", 0, 99)]),
    ];
    for (start, end, want) in cases {
        let meta = ShardMetadata::of_range(layout.params(), *start..end + 1);
        let got: Vec<_> =
            meta.params.iter().map(|p| (p.path.as_str(), *p.elements.start(), *p.elements.end())).collect();
        assert_eq!(got, *want, "[{start}, {end}]");
    }
}

#[test]
fn a_tied_parameter_is_stored_once_under_the_first_path() {
    let mut list = specs(&[vec![4, 2], vec![3]]);
    list.push(ParamSpec::f32("head", 0, [4, 2]));
    let layout = FlatLayout::build("root", &list, 2).expect("ties are allowed");
    assert_eq!(layout.numel(), 11);
    assert_eq!(layout.params().len(), 2);
    let shared = &layout.shared_params()[0];
    assert_eq!((shared.path.as_str(), shared.primary_path.as_str(), shared.param_index), ("head", "p0", 0));
    assert_eq!(layout.find("head"), layout.find("p0"));
}

#[test]
fn ranks_beyond_the_data_hold_only_padding() {
    let layout = layout(&[vec![1], vec![2]], 5);
    assert_eq!((layout.shard_numel(), layout.padded_numel()), (1, 5));
    for rank in 3..5 {
        assert!(layout.shard_range(rank).is_empty());
        let meta = layout.shard_metadata(rank);
        assert!(meta.params.is_empty() && meta.param_indices.is_empty());
    }
}

#[test]
fn zero_size_parameters_are_listed_but_own_nothing() {
    let layout = layout(&[vec![0, 7], vec![2], vec![0]], 2);
    assert_eq!(layout.params().len(), 3);
    assert_eq!(layout.shard_metadata(0).params.len(), 1);
    let empty = self::layout(&[vec![0]], 3);
    assert_eq!((empty.numel(), empty.shard_numel(), empty.padded_numel()), (0, 0, 0));
}

#[test]
fn lists_that_cannot_be_flat_say_why() {
    let bf16 = |s: ParamSpec| ParamSpec { dtype: DType::BF16, ..s };
    let frozen = |s: ParamSpec| ParamSpec { requires_grad: false, ..s };
    let two = specs(&[vec![2], vec![3]]);
    let cases: Vec<(Vec<ParamSpec>, &[&str])> = vec![
        (vec![], &["unit `u`", "empty list"]),
        (vec![two[0].clone(), bf16(two[1].clone())], &["`p0` is f32", "`p1` is bf16"]),
        (
            vec![ParamSpec { dtype: DType::Int, ..two[0].clone() }],
            &["`p0`", "integer parameters are unsupported"],
        ),
        (vec![two[0].clone(), frozen(two[1].clone())], &["`p0` requires a gradient", "`p1` does not"]),
        (vec![frozen(two[0].clone()), two[1].clone()], &["`p1` requires a gradient", "`p0` does not"]),
        (
            vec![ParamSpec { owner: Some("blocks.0".into()), ..two[0].clone() }],
            &["`p0` already belongs", "`blocks.0`", "do not nest"],
        ),
        (vec![two[0].clone(), ParamSpec { identity: 9, ..two[0].clone() }], &["path `p0`"]),
    ];
    for (list, words) in cases {
        let message = FlatLayout::build("u", &list, 2).expect_err("must be refused").to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} lacks {word:?}");
        }
    }
    assert!(matches!(FlatLayout::build("u", &two, 0), Err(LayoutError::NoRanks { .. })));
}

#[test]
fn mixed_lists_split_into_one_flat_parameter_for_each_kind() {
    let mut list = specs(&[vec![2], vec![3], vec![5], vec![7]]);
    list[1].requires_grad = false;
    list[2].dtype = DType::BF16;
    let groups = FlatLayout::build_groups("u", &list, 2).expect("mixed lists are allowed");
    let got: Vec<_> = groups.iter().map(|g| (g.dtype(), g.requires_grad(), g.numel())).collect();
    assert_eq!(got, [(DType::F32, true, 9), (DType::F32, false, 3), (DType::BF16, true, 5)]);
}

fn shapes() -> impl Strategy<Value = Vec<Vec<usize>>> {
    prop::collection::vec(prop::collection::vec(0usize..6, 0..4), 1..8)
}

proptest! {
    /// The shards of all ranks cover every element once, in order, and have equal padded sizes.
    #[test]
    fn shards_partition_the_flat_parameter(shapes in shapes(), world in 1usize..12) {
        let layout = layout(&shapes, world);
        let mut next = 0;
        for rank in 0..world {
            let range = layout.shard_range(rank);
            prop_assert!(range.start == next || range.is_empty());
            prop_assert!(range.len() <= layout.shard_numel());
            next = next.max(range.end);
        }
        prop_assert_eq!(next, layout.numel());
        prop_assert!(layout.padded_numel() - layout.numel() < world.max(1));
    }

    /// Every element of every parameter is in exactly one rank's metadata, at the place where the shard has it.
    #[test]
    fn metadata_finds_every_element_once(shapes in shapes(), world in 1usize..12) {
        let layout = layout(&shapes, world);
        let mut owners = vec![0u32; layout.numel()];
        for rank in 0..world {
            let start = layout.shard_range(rank).start;
            for part in layout.shard_metadata(rank).params {
                let info = layout.find(&part.path).expect("a parameter of the layout");
                prop_assert_eq!(part.shard_range().len(), part.len());
                for (k, element) in part.elements.clone().enumerate() {
                    prop_assert_eq!(info.offset + element, start + part.shard_offset + k);
                    owners[info.offset + element] += 1;
                }
            }
        }
        prop_assert!(owners.iter().all(|&n| n == 1));
    }

    /// The parameters lie one after another without gaps.
    #[test]
    fn offsets_are_running_sums(shapes in shapes(), world in 1usize..4) {
        let layout = layout(&shapes, world);
        let mut offset = 0;
        for (param, shape) in layout.params().iter().zip(&shapes) {
            prop_assert_eq!(param.offset, offset);
            prop_assert_eq!(param.numel, shape.iter().product::<usize>());
            offset += param.numel;
        }
        prop_assert_eq!(layout.numel(), offset);
    }
}
