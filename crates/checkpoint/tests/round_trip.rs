//! Round trips: whatever is written comes back, in every layout and type, for every world size, in one file
//! or many.

mod common;

use common::{bits, listing, read, shards, spec};
use half::{bf16, f16};
use proptest::prelude::*;
use shardwise_checkpoint::{FloatType, FolderWriter, SafetensorsFolder, StoredLayout, TensorSpec};

/// A tensor, its values as f32 (any bit pattern), and how it is to be stored.
#[derive(Debug, Clone)]
struct Tensor {
    spec: TensorSpec,
    values: Vec<f32>,
    layout: StoredLayout,
}

fn any_dtype() -> impl Strategy<Value = FloatType> {
    prop_oneof![Just(FloatType::F32), Just(FloatType::F16), Just(FloatType::Bf16)]
}

/// A value of a type: any f32 pattern, or any pattern of a narrow type, widened.
fn value(dtype: FloatType, pattern: u32) -> f32 {
    let narrow = pattern as u16;
    match dtype {
        FloatType::F32 => f32::from_bits(pattern),
        FloatType::F16 => f16::from_bits(narrow).to_f32(),
        FloatType::Bf16 => bf16::from_bits(narrow).to_f32(),
    }
}

fn any_tensor() -> impl Strategy<Value = Tensor> {
    (prop::collection::vec(0usize..12, 0..4), any_dtype(), any::<bool>())
        .prop_flat_map(|(shape, dtype, turned)| {
            let elements = shape.iter().product::<usize>();
            (Just((shape, dtype, turned)), prop::collection::vec(any::<u32>(), elements))
        })
        .prop_map(|((shape, dtype, turned), patterns)| {
            let layout =
                if turned && shape.len() == 2 { StoredLayout::Transposed } else { StoredLayout::AsIs };
            let values = patterns.into_iter().map(|pattern| value(dtype, pattern)).collect();
            Tensor { spec: TensorSpec { name: String::new(), shape, dtype }, values, layout }
        })
}

fn any_model() -> impl Strategy<Value = Vec<Tensor>> {
    prop::collection::vec(any_tensor(), 1..8).prop_map(|mut tensors| {
        for (number, tensor) in tensors.iter_mut().enumerate() {
            tensor.spec.name = format!("layer.{number}.weight");
        }
        tensors
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_comes_back_shard_by_shard(
        model in any_model(),
        world_size in 1usize..=5,
        max_file_bytes in prop_oneof![Just(u64::MAX), 0u64..1500],
        reversed in any::<bool>(),
    ) {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("model");
        let plan = model.iter().map(|tensor| tensor.spec.clone()).collect();
        let mut writer = FolderWriter::create(&path, plan, max_file_bytes).unwrap();
        let mut order: Vec<&Tensor> = model.iter().collect();
        if reversed {
            order.reverse();
        }
        for tensor in order {
            writer.write(&tensor.spec.name, &tensor.values, tensor.layout).unwrap();
        }
        writer.finish().unwrap();
        prop_assert_eq!(listing(parent.path()), ["model"]);

        let folder = SafetensorsFolder::open(&path).unwrap();
        prop_assert_eq!(folder.names().count(), model.len());
        for Tensor { spec, values, layout } in &model {
            let info = folder.info(&spec.name).unwrap();
            prop_assert_eq!((&info.shape, info.dtype), (&spec.shape, spec.dtype.into()));
            for range in shards(values.len(), world_size) {
                let shard = read(&folder, &spec.name, range.clone(), *layout).unwrap();
                prop_assert_eq!(bits(&shard), bits(&values[range.clone()]), "{} {:?}", spec.name, range);
            }
        }
    }

    #[test]
    fn what_was_read_with_one_layout_and_written_with_it_gives_the_same_file(
        rows in 1usize..40,
        columns in 1usize..40,
        dtype in any_dtype(),
        seed in any::<u32>(),
    ) {
        let pattern = |k: usize| seed.wrapping_mul(2_654_435_761).wrapping_add(k as u32).rotate_left(7);
        let values: Vec<f32> = (0..rows * columns).map(|k| value(dtype, pattern(k))).collect();
        let parent = tempfile::tempdir().unwrap();
        let (first, second) = (parent.path().join("first"), parent.path().join("second"));
        let plan = vec![spec("w", &[rows, columns], dtype)];
        let mut writer = FolderWriter::create(&first, plan.clone(), u64::MAX).unwrap();
        writer.write("w", &values, StoredLayout::AsIs).unwrap();
        writer.finish().unwrap();

        let folder = SafetensorsFolder::open(&first).unwrap();
        let ours = read(&folder, "w", 0..rows * columns, StoredLayout::Transposed).unwrap();
        let mut writer = FolderWriter::create(&second, plan, u64::MAX).unwrap();
        writer.write("w", &ours, StoredLayout::Transposed).unwrap();
        writer.finish().unwrap();
        let bytes = |folder: &std::path::Path| std::fs::read(folder.join("model.safetensors")).unwrap();
        prop_assert!(bytes(&first) == bytes(&second));
    }
}

#[test]
fn matrices_of_many_blocks_come_back() {
    // Longer than a row that is written whole; more rows than a block has; both in a narrow type.
    for (rows, columns, dtype) in
        [(3, 70_001, FloatType::F32), (70_001, 3, FloatType::F32), (40, 140_000, FloatType::Bf16)]
    {
        let values: Vec<f32> = (0..rows * columns).map(|k| (k % 251) as f32).collect();
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("model");
        let plan = vec![spec("as_is", &[rows, columns], dtype), spec("turned", &[rows, columns], dtype)];
        let mut writer = FolderWriter::create(&path, plan, u64::MAX).unwrap();
        writer.write("as_is", &values, StoredLayout::AsIs).unwrap();
        writer.write("turned", &values, StoredLayout::Transposed).unwrap();
        writer.finish().unwrap();

        let folder = SafetensorsFolder::open(&path).unwrap();
        for (name, layout) in [("as_is", StoredLayout::AsIs), ("turned", StoredLayout::Transposed)] {
            for range in shards(values.len(), 3) {
                assert!(read(&folder, name, range.clone(), layout).unwrap() == values[range]);
            }
        }
        let in_file = read(&folder, "turned", 0..values.len(), StoredLayout::AsIs).unwrap();
        assert!(in_file == common::transposed(&values, columns, rows), "as [rows, columns] in the file");
    }
}
