//! Writing: what files a folder gets, what they say, and what a writer refuses.

mod common;

use std::fs;
use std::path::Path;

use common::{listing, read, spec};
use safetensors::SafeTensors;
use shardwise_checkpoint::{
    COMPANION_FILES, DEFAULT_MAX_FILE_BYTES, Error, FloatType, FolderWriter, SafetensorsFolder, StoredLayout,
    TensorSpec,
};

const AS_IS: StoredLayout = StoredLayout::AsIs;

/// Three tensors of 40, 24 and 40 bytes.
fn three() -> Vec<TensorSpec> {
    vec![
        spec("c", &[10], FloatType::F32),
        spec("b", &[3, 4], FloatType::Bf16),
        spec("a", &[10], FloatType::F32),
    ]
}

fn write_three(folder: &Path, max_file_bytes: u64) {
    let mut writer = FolderWriter::create(folder, three(), max_file_bytes).unwrap();
    writer.write("b", &[2.0; 12], AS_IS).unwrap();
    writer.write("a", &[1.0; 10], AS_IS).unwrap();
    writer.write("c", &[3.0; 10], AS_IS).unwrap();
    writer.finish().unwrap();
}

#[test]
fn files_are_filled_in_the_plans_order_up_to_the_limit() {
    // The limit, and the tensors of each file.
    let cases: [(u64, &[&[&str]]); 6] = [
        (DEFAULT_MAX_FILE_BYTES, &[&["a", "b", "c"]]),
        (104, &[&["a", "b", "c"]]),
        (103, &[&["b", "c"], &["a"]]),
        (64, &[&["b", "c"], &["a"]]),
        (63, &[&["c"], &["b"], &["a"]]),
        (0, &[&["c"], &["b"], &["a"]]),
    ];
    for (limit, files) in cases {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("m");
        write_three(&folder, limit);
        let count = files.len();
        let name = |k: usize| format!("model-{:05}-of-{count:05}.safetensors", k + 1);
        let mut expected: Vec<String> = (0..count).map(name).collect();
        if count == 1 {
            expected = vec!["model.safetensors".into()];
        } else {
            expected.push("model.safetensors.index.json".into());
        }
        assert_eq!(listing(&folder), expected, "limit {limit}");

        let weights = SafetensorsFolder::open(&folder).unwrap();
        for (file, tensors) in expected.iter().zip(files) {
            let inside = |name: &&str| weights.info(name).unwrap().file.ends_with(file);
            assert_eq!(weights.names().filter(inside).collect::<Vec<_>>(), *tensors, "limit {limit}");
        }
        for (name, value, elements) in [("a", 1.0, 10), ("b", 2.0, 12), ("c", 3.0, 10)] {
            assert_eq!(read(&weights, name, 0..elements, AS_IS).unwrap(), vec![value; elements]);
        }
    }
}

#[test]
fn the_index_is_laid_out_as_transformers_does_it() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    write_three(&folder, 64);
    let index = fs::read_to_string(folder.join("model.safetensors.index.json")).unwrap();
    let expected = r#"{
  "metadata": {
    "total_size": 104
  },
  "weight_map": {
    "a": "model-00002-of-00002.safetensors",
    "b": "model-00001-of-00002.safetensors",
    "c": "model-00001-of-00002.safetensors"
  }
}
"#;
    assert_eq!(index, expected);
}

#[test]
fn the_safetensors_crate_accepts_each_file_and_finds_it_aligned() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    let plan = vec![
        spec("odd", &[3], FloatType::Bf16),
        spec("z", &[], FloatType::F32),
        spec("half", &[1], FloatType::F16),
        spec("none", &[0, 7], FloatType::F32),
        spec("y", &[2], FloatType::F32),
    ];
    let mut writer = FolderWriter::create(&folder, plan.clone(), DEFAULT_MAX_FILE_BYTES).unwrap();
    for TensorSpec { name, shape, .. } in &plan {
        writer.write(name, &vec![1.5; shape.iter().product()], AS_IS).unwrap();
    }
    writer.finish().unwrap();

    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let (header_bytes, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header_bytes % 8, 0);
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt", "transformers asks for it");
    for TensorSpec { name, shape, dtype } in &plan {
        let info = metadata.info(name).unwrap();
        assert_eq!((&info.shape, info.dtype), (shape, (*dtype).into()));
        assert_eq!((info.data_offsets.0 * 8) % info.dtype.bitsize(), 0, "{name} is aligned");
    }
}

#[test]
fn narrow_types_are_rounded_to_nearest_and_never_to_infinity() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    let plan = vec![spec("h", &[4], FloatType::F16), spec("b", &[4], FloatType::Bf16)];
    let mut writer = FolderWriter::create(&folder, plan, DEFAULT_MAX_FILE_BYTES).unwrap();

    for (name, too_large) in [("h", 65520.0), ("h", -1e9), ("b", f32::MAX)] {
        let error = writer.write(name, &[0.0, 1.0, too_large, 2.0], AS_IS).unwrap_err();
        assert!(
            matches!(&error, Error::Overflow { tensor, element: 2, value, .. } if tensor == name && *value == too_large),
            "{error}"
        );
    }
    // After a refusal the same tensor may be written again; infinities that were there stay.
    writer.write("h", &[65519.0, f32::INFINITY, 1.0 + 3.0 / 2048.0, 1e-9], AS_IS).unwrap();
    writer.write("b", &[3.38e38, f32::NEG_INFINITY, 1.0 + 1.0 / 256.0, -0.0], AS_IS).unwrap();
    writer.finish().unwrap();

    let weights = SafetensorsFolder::open(&folder).unwrap();
    let half = read(&weights, "h", 0..4, AS_IS).unwrap();
    assert_eq!(half, [65504.0, f32::INFINITY, 1.0 + 2.0 / 1024.0, 0.0]);
    let brain = read(&weights, "b", 0..4, AS_IS).unwrap();
    assert!(brain[0].is_finite() && brain[3].is_sign_negative());
    assert_eq!(brain[1..], [f32::NEG_INFINITY, 1.0, -0.0]);
}

#[test]
fn plans_that_cannot_be_written_are_refused_before_anything_is_made() {
    let f32s = |name: &str, shape: &[usize]| spec(name, shape, FloatType::F32);
    let cases = [
        ("nothing", vec![], "at least one tensor"),
        ("no name", vec![f32s("", &[1])], "names"),
        ("the header's own key", vec![f32s("__metadata__", &[1])], "__metadata__"),
        ("one name twice", vec![f32s("a", &[1]), f32s("b", &[1]), f32s("a", &[2])], "`a` twice"),
        ("too many elements", vec![f32s("a", &[usize::MAX, 2])], "64 bits"),
        ("too many bytes", vec![f32s("a", &[usize::MAX])], "64 bits"),
        ("too many together", vec![f32s("a", &[usize::MAX / 4]), f32s("b", &[usize::MAX / 4])], "64 bits"),
    ];
    for (case, plan, said) in cases {
        let parent = tempfile::tempdir().unwrap();
        let error = FolderWriter::create(parent.path().join("m"), plan, u64::MAX).unwrap_err();
        assert!(matches!(error, Error::Plan { .. }), "{case}: {error}");
        assert!(error.to_string().contains(said), "{case}: {error}");
        assert!(listing(parent.path()).is_empty(), "{case}");
    }
}

#[test]
fn tensors_out_of_plan_are_refused() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    let mut writer = FolderWriter::create(&folder, three(), 64).unwrap();

    let error = writer.write("d", &[], AS_IS).unwrap_err();
    assert!(matches!(error, Error::Unplanned { planned: 3, .. }), "{error}");
    let error = writer.write("a", &[0.0; 9], AS_IS).unwrap_err();
    assert!(matches!(error, Error::SliceLength { expected: 10, found: 9, .. }), "{error}");
    let error = writer.write("a", &[0.0; 10], StoredLayout::Transposed).unwrap_err();
    assert!(matches!(error, Error::NotAMatrix { .. }), "{error}");
    writer.write("a", &[0.0; 10], AS_IS).unwrap();
    let error = writer.write("a", &[0.0; 10], AS_IS).unwrap_err();
    assert!(matches!(error, Error::WrittenTwice { .. }), "{error}");
    let error = writer.finish().unwrap_err();
    assert!(matches!(&error, Error::NotWritten { missing: 2, example, .. } if example == "b"), "{error}");
    assert!(listing(parent.path()).is_empty(), "nothing is left of it");
}

#[test]
fn small_files_are_those_of_a_model_folder() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    let mut writer = FolderWriter::create(&folder, vec![spec("w", &[1], FloatType::F32)], u64::MAX).unwrap();
    writer.write("w", &[1.0], AS_IS).unwrap();
    for name in COMPANION_FILES {
        writer.add_file(name, name.as_bytes()).unwrap();
    }
    for name in ["config.json", "README.md", "model.safetensors", "../config.json", "/tmp/config.json", ""] {
        let error = writer.add_file(name, b"x").unwrap_err();
        assert!(matches!(&error, Error::Companion { name: named, .. } if named == name), "{error}");
    }
    writer.finish().unwrap();
    for name in COMPANION_FILES {
        assert_eq!(fs::read(folder.join(name)).unwrap(), name.as_bytes());
    }
    assert_eq!(listing(&folder).len(), COMPANION_FILES.len() + 1);
}
