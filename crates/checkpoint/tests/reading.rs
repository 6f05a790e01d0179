//! Reading: each rank gets exactly its elements, reads little else, and is told by name what cannot be read.

mod common;

use common::{bits, put_file, read, shards, spec, transposed};
use half::{bf16, f16};
use shardwise_checkpoint::{
    DEFAULT_MAX_FILE_BYTES, Dtype, Error, FloatType, FolderWriter, SafetensorsFolder, StoredLayout,
};

/// A folder with one tensor `w`, whose values are 0, 1, 2, ... in file order.
fn counting(parent: &tempfile::TempDir, shape: &[usize], dtype: FloatType) -> SafetensorsFolder {
    let folder = parent.path().join("m");
    let values: Vec<f32> = (0..shape.iter().product()).map(|k: usize| k as f32).collect();
    let mut writer =
        FolderWriter::create(&folder, vec![spec("w", shape, dtype)], DEFAULT_MAX_FILE_BYTES).unwrap();
    writer.write("w", &values, StoredLayout::AsIs).unwrap();
    writer.finish().unwrap();
    SafetensorsFolder::open(&folder).unwrap()
}

#[test]
fn names_shapes_and_types_are_those_of_the_header() {
    let parent = tempfile::tempdir().unwrap();
    let header = r#"{"__metadata__":{"format":"pt"},
        "a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},
        "mask":{"dtype":"BOOL","shape":[3],"data_offsets":[8,11]},
        "s":{"dtype":"BF16","shape":[],"data_offsets":[11,13]}}"#;
    put_file(parent.path(), "model.safetensors", header, &[0; 13]);
    let folder = SafetensorsFolder::open(parent.path()).unwrap();

    assert_eq!(folder.names().collect::<Vec<_>>(), ["a", "mask", "s"]);
    let info = folder.info("s").unwrap();
    assert_eq!((info.shape.as_slice(), info.dtype, info.numel()), ([].as_slice(), Dtype::BF16, 1));
    assert_eq!(info.file, parent.path().join("model.safetensors"));
    assert_eq!(read(&folder, "s", 0..1, StoredLayout::AsIs).unwrap(), [0.0], "data may start at any byte");
}

#[test]
fn as_is_reads_a_ranks_share_and_not_a_byte_more() {
    for (dtype, element_bytes) in [(FloatType::F32, 4), (FloatType::F16, 2), (FloatType::Bf16, 2)] {
        for world_size in 1..=5 {
            let parent = tempfile::tempdir().unwrap();
            let folder = counting(&parent, &[7, 9], dtype);
            for range in shards(63, world_size) {
                let before = folder.bytes_read();
                let shard = read(&folder, "w", range.clone(), StoredLayout::AsIs).unwrap();
                assert!(shard.iter().copied().eq(range.clone().map(|k| k as f32)));
                assert_eq!(folder.bytes_read() - before, (range.len() * element_bytes) as u64);
            }
            assert_eq!(folder.bytes_read(), 63 * element_bytes as u64, "all ranks of {world_size} together");
        }
    }
}

#[test]
fn transposed_reads_at_most_twice_a_ranks_share() {
    // Small gaps are read through, large ones are not; the last two shapes take several blocks.
    for (rows, columns) in [(3, 5), (64, 64), (1, 40), (40, 1), (300, 5000), (7, 70_000), (9000, 130)] {
        let parent = tempfile::tempdir().unwrap();
        let folder = counting(&parent, &[rows, columns], FloatType::F32);
        let in_file: Vec<f32> = (0..rows * columns).map(|k| k as f32).collect();
        let ours = transposed(&in_file, rows, columns);
        for world_size in [1, 2, 3, 8, 64] {
            for range in shards(rows * columns, world_size) {
                let before = folder.bytes_read();
                let shard = read(&folder, "w", range.clone(), StoredLayout::Transposed).unwrap();
                assert!(shard == ours[range.clone()], "[{rows}, {columns}] {range:?} of {world_size}");
                let (share, bytes) = (range.len() as u64 * 4, folder.bytes_read() - before);
                let most = 2 * share;
                assert!(bytes >= share && bytes <= most, "[{rows}, {columns}] {range:?}: {bytes} bytes");
            }
        }
    }
}

#[test]
fn transposed_reads_nothing_extra_unless_the_gaps_are_small() {
    let parent = tempfile::tempdir().unwrap();
    let (rows, columns) = (64, 4096);
    let folder = counting(&parent, &[rows, columns], FloatType::F32);
    for wanted in [0..1, 0..columns / 8, 5..7, 0..2500, 0..columns] {
        let range = wanted.start * rows..wanted.end * rows;
        let before = folder.bytes_read();
        read(&folder, "w", range.clone(), StoredLayout::Transposed).unwrap();
        assert_eq!(folder.bytes_read() - before, range.len() as u64 * 4, "columns {wanted:?}");
    }
}

#[test]
fn every_range_of_a_small_matrix_is_read_right() {
    let parent = tempfile::tempdir().unwrap();
    let folder = counting(&parent, &[4, 5], FloatType::Bf16);
    let in_file: Vec<f32> = (0..20).map(|k| k as f32).collect();
    let ours = transposed(&in_file, 4, 5);
    for start in 0..=20 {
        for end in start..=20 {
            assert_eq!(read(&folder, "w", start..end, StoredLayout::AsIs).unwrap(), in_file[start..end]);
            assert_eq!(read(&folder, "w", start..end, StoredLayout::Transposed).unwrap(), ours[start..end]);
        }
    }
}

#[test]
fn nan_and_other_patterns_arrive_bit_for_bit() {
    let patterns: [u32; 8] =
        [0x7FC0_0000, 0x7F80_0001, 0xFFBF_FFFF, 0x7F80_0000, 0x8000_0000, 1, 0xFFFF_FFFF, 0x3F80_0000];
    let parent = tempfile::tempdir().unwrap();
    let data: Vec<u8> = patterns.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let header = r#"{"w":{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]}}"#;
    put_file(parent.path(), "model.safetensors", header, &data);
    let folder = SafetensorsFolder::open(parent.path()).unwrap();
    assert_eq!(bits(&read(&folder, "w", 0..8, StoredLayout::AsIs).unwrap()), patterns);
    assert_eq!(
        bits(&read(&folder, "w", 0..8, StoredLayout::Transposed).unwrap()),
        transposed(&patterns, 2, 4)
    );
}

#[test]
fn every_half_precision_value_is_widened_exactly() {
    let parent = tempfile::tempdir().unwrap();
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let header = r#"{"b":{"dtype":"BF16","shape":[65536],"data_offsets":[0,131072]},
                     "h":{"dtype":"F16","shape":[65536],"data_offsets":[131072,262144]}}"#;
    put_file(parent.path(), "model.safetensors", header, &[all.clone(), all].concat());
    let folder = SafetensorsFolder::open(parent.path()).unwrap();
    let brain = read(&folder, "b", 0..65536, StoredLayout::AsIs).unwrap();
    let half = read(&folder, "h", 0..65536, StoredLayout::AsIs).unwrap();
    for pattern in 0..=u16::MAX {
        let (brain, half) = (brain[usize::from(pattern)], half[usize::from(pattern)]);
        assert_eq!(brain.to_bits(), u32::from(pattern) << 16);
        let expected = f16::from_bits(pattern);
        assert!(half.is_nan() == expected.is_nan() && (half.is_nan() || half == f32::from(expected)));
        assert_eq!(half.is_sign_negative(), expected.is_sign_negative());
        assert_eq!(brain.is_nan(), bf16::from_bits(pattern).is_nan());
    }
}

#[test]
fn other_element_types_are_listed_but_refused_by_name() {
    for (dtype, bytes) in [("F64", 8), ("I64", 8), ("I32", 4), ("U8", 1), ("BOOL", 1), ("F8_E4M3", 1)] {
        let parent = tempfile::tempdir().unwrap();
        let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,{bytes}]}}}}"#);
        put_file(parent.path(), "model.safetensors", &header, &vec![0; bytes]);
        let folder = SafetensorsFolder::open(parent.path()).unwrap();
        let error = read(&folder, "w", 0..1, StoredLayout::AsIs).unwrap_err();
        assert!(matches!(&error, Error::UnsupportedDtype { tensor, .. } if tensor == "w"), "{error}");
        assert!(error.to_string().contains(dtype), "{error}");
    }
}

#[test]
fn scalars_and_empty_tensors_are_read() {
    let parent = tempfile::tempdir().unwrap();
    let header = r#"{"e":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]},
                     "f":{"dtype":"F16","shape":[0,2],"data_offsets":[0,0]},
                     "s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
    put_file(parent.path(), "model.safetensors", header, &2.5f32.to_le_bytes());
    let folder = SafetensorsFolder::open(parent.path()).unwrap();
    assert_eq!(read(&folder, "s", 0..1, StoredLayout::AsIs).unwrap(), [2.5]);
    for name in ["e", "f"] {
        for layout in [StoredLayout::AsIs, StoredLayout::Transposed] {
            assert!(read(&folder, name, 0..0, layout).unwrap().is_empty());
        }
    }
}

#[test]
fn impossible_requests_are_typed_errors() {
    let parent = tempfile::tempdir().unwrap();
    let folder = counting(&parent, &[2, 3], FloatType::F32);
    let as_is = StoredLayout::AsIs;

    let error = read(&folder, "transformer.w", 0..1, as_is).unwrap_err();
    assert!(matches!(&error, Error::UnknownTensor { example, .. } if example == "w"), "{error}");
    assert!(matches!(folder.info("x"), Err(Error::UnknownTensor { count: 1, .. })));

    #[expect(clippy::reversed_empty_ranges, reason = "it is what must be refused")]
    for range in [0..7, 7..7, usize::MAX..usize::MAX, 3..2] {
        let error = folder.read_range("w", range, as_is, &mut []).unwrap_err();
        assert!(matches!(error, Error::Range { elements: 6, .. }), "{error}");
    }
    let error = folder.read_range("w", 0..4, as_is, &mut [0.0; 3]).unwrap_err();
    assert!(matches!(error, Error::SliceLength { expected: 4, found: 3, .. }), "{error}");

    for shape in [&[6][..], &[], &[1, 2, 3]] {
        let parent = tempfile::tempdir().unwrap();
        let folder = counting(&parent, shape, FloatType::F32);
        let error = read(&folder, "w", 0..1, StoredLayout::Transposed).unwrap_err();
        assert!(matches!(error, Error::NotAMatrix { .. }), "{error}");
    }
    assert_eq!(folder.bytes_read(), 0, "a refusal reads nothing");
}

#[test]
fn threads_share_one_folder() {
    let parent = tempfile::tempdir().unwrap();
    let folder = counting(&parent, &[64, 64], FloatType::F32);
    std::thread::scope(|scope| {
        for range in shards(4096, 4) {
            let folder = &folder;
            scope.spawn(move || {
                let shard = read(folder, "w", range.clone(), StoredLayout::AsIs).unwrap();
                assert!(shard.into_iter().eq(range.map(|k| k as f32)));
            });
        }
    });
    assert_eq!(folder.bytes_read(), 4096 * 4);
}
