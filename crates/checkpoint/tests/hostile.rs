//! Hostile input: damaged, truncated and lying files are typed errors that name the file; nothing panics.

mod common;

use std::fs;
use std::path::Path;

use common::{file_bytes, put_file, read};
use shardwise_checkpoint::{Error, SafetensorsFolder, StoredLayout};

const SOUND: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[3],"data_offsets":[8,14]}}"#;

/// Opens a folder with this one file, and reads whatever opens.
fn open_bytes(bytes: &[u8]) -> Result<(), Error> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let weights = SafetensorsFolder::open(folder.path())?;
    for name in weights.names() {
        // A flipped bit may have made it a type that is refused; it must not panic or run on.
        let elements = weights.info(name)?.numel();
        let _any = read(&weights, name, 0..elements, StoredLayout::AsIs);
    }
    Ok(())
}

/// That opening fails because of the header, saying this.
fn assert_header_error(case: &str, bytes: &[u8], said: &str) {
    let error = open_bytes(bytes).expect_err(case);
    assert!(
        matches!(&error, Error::Header { file, .. } if file.ends_with("model.safetensors")),
        "{case}: {error}"
    );
    assert!(error.to_string().contains(said), "{case}: {error}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = file_bytes(SOUND, &[1; 14]);
    open_bytes(&whole).unwrap();
    for length in 0..whole.len() {
        assert_header_error(&format!("cut to {length} bytes"), &whole[..length], "model.safetensors");
    }
    assert_header_error("one byte more", &file_bytes(SOUND, &[1; 15]), "14 bytes of data");
}

#[test]
fn no_flipped_bit_in_the_header_panics() {
    let whole = file_bytes(SOUND, &[1; 14]);
    for position in 0..8 + SOUND.len() {
        for bit in 0..8 {
            let mut damaged = whole.clone();
            damaged[position] ^= 1 << bit;
            if let Err(error) = open_bytes(&damaged) {
                assert!(matches!(error, Error::Header { .. }), "byte {position} bit {bit}: {error}");
            }
        }
    }
}

#[test]
fn a_header_length_beyond_the_file_is_refused_without_reading_it() {
    for length in [15, 1 << 20, 100_000_001, u64::from(u32::MAX), u64::MAX - 8, u64::MAX] {
        let bytes = [&length.to_le_bytes()[..], b"{}            "].concat();
        assert_header_error(&format!("length {length}"), &bytes, "header of at most 14 bytes");
    }
}

#[test]
fn headers_that_lie_are_refused_with_the_reason() {
    let tensor = |entry: &str| format!(r#"{{"w":{entry}}}"#);
    let cases = [
        ("no header", String::new(), "starts with `{`"),
        ("not an object", "[]".into(), "starts with `{`"),
        ("leading space", " {}".into(), "starts with `{`"),
        ("unfinished", "{".into(), "one JSON object"),
        ("two objects", "{}{}".into(), "one JSON object"),
        ("nested far", format!("{{\"w\":{}1{}}}", "[".repeat(500), "]".repeat(500)), "tensor `w`"),
        ("no dtype", tensor(r#"{"shape":[1],"data_offsets":[0,4]}"#), "tensor `w`"),
        (
            "unknown dtype",
            tensor(r#"{"dtype":"F33","shape":[1],"data_offsets":[0,4]}"#),
            "tensor `w`, found unknown variant `F33`",
        ),
        ("negative extent", tensor(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#), "tensor `w`"),
        ("broken extent", tensor(r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#), "tensor `w`"),
        ("one offset", tensor(r#"{"dtype":"F32","shape":[1],"data_offsets":[4]}"#), "tensor `w`"),
        ("dtype twice", tensor(r#"{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}"#), "dtype"),
        ("reversed offsets", tensor(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#), "start at byte 0"),
        ("reversed from 0", tensor(r#"{"dtype":"F32","shape":[0],"data_offsets":[0,-4]}"#), "tensor `w`"),
        ("past the end", tensor(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#), "8 bytes of data"),
        ("too short", tensor(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), "to take 8 bytes"),
        ("hole at the start", tensor(r#"{"dtype":"F32","shape":[0],"data_offsets":[4,4]}"#), "start at byte 0"),
        ("hole at the end", tensor(r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#), "0 bytes of data"),
        (
            "too many elements",
            tensor(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}"#),
            "more than fits 64 bits",
        ),
        (
            "too many bytes",
            tensor(r#"{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,4]}"#),
            "more than fits 64 bits",
        ),
        ("half a byte", tensor(r#"{"dtype":"F4","shape":[9],"data_offsets":[0,4]}"#), "safetensors crate"),
        (
            "overlap",
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}"#
                .into(),
            "tensor `x` to start at byte 4",
        ),
        (
            "the same bytes twice",
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#
                .into(),
            "to start at byte 4",
        ),
        (
            "one name twice",
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#
                .into(),
            "`w` given twice",
        ),
        ("metadata of numbers", r#"{"__metadata__":{"format":1}}"#.into(), "strings to strings"),
        ("metadata no object", r#"{"__metadata__":"pt"}"#.into(), "strings to strings"),
    ];
    for (case, header, said) in cases {
        assert_header_error(case, &file_bytes(&header, &[0; 4]), said);
    }
    let not_utf8 = [&5u64.to_le_bytes()[..], b"{\"\xFF\"}", &[0; 4]].concat();
    assert_header_error("not UTF-8", &not_utf8, "UTF-8");
}

/// A sound file with these F32 scalars.
fn put_scalars(folder: &Path, file: &str, names: &[&str]) {
    let entries: Vec<String> = (names.iter().enumerate())
        .map(|(k, name)| {
            format!(r#""{name}":{{"dtype":"F32","shape":[],"data_offsets":[{},{}]}}"#, 4 * k, 4 * k + 4)
        })
        .collect();
    let data: Vec<u8> = (0..names.len()).flat_map(|k| (k as f32).to_le_bytes()).collect();
    put_file(folder, file, &format!("{{{}}}", entries.join(",")), &data);
}

/// A folder with two sound files (`one` holds `a` and `b`, `two` holds `c`) and this index.
fn open_index(index: &str) -> Result<SafetensorsFolder, Error> {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    put_scalars(&inner, "one.safetensors", &["a", "b"]);
    put_scalars(&inner, "two.safetensors", &["c"]);
    put_scalars(&inner, "copy.safetensors", &["b", "d"]);
    put_scalars(folder.path(), "outside.safetensors", &["a"]);
    fs::write(inner.join("model.safetensors.index.json"), index).unwrap();
    SafetensorsFolder::open(&inner)
}

#[test]
fn an_index_and_its_files_are_one_folder() {
    let index = r#"{"metadata":{"total_size":12.0,"more":[]},"weight_map":{"a":"one.safetensors","c":"two.safetensors"}}"#;
    let folder = open_index(index).unwrap();
    assert_eq!(folder.names().collect::<Vec<_>>(), ["a", "b", "c"], "as transformers, unlisted `b` included");
    assert!(folder.info("c").unwrap().file.ends_with("two.safetensors"));
    assert_eq!(read(&folder, "b", 0..1, StoredLayout::AsIs).unwrap(), [1.0]);
}

#[test]
fn an_index_that_is_none_is_refused() {
    let cases = [
        ("empty", "", "EOF"),
        ("no object", "[]", "weight_map"),
        ("no weight map", r#"{"metadata":{}}"#, "weight_map"),
        ("empty weight map", r#"{"weight_map":{}}"#, "at least one tensor"),
        ("a number for a file", r#"{"weight_map":{"a":1}}"#, "tensor `a`"),
        (
            "a tensor twice",
            r#"{"weight_map":{"a":"one.safetensors","a":"two.safetensors"}}"#,
            "`a` given twice",
        ),
        ("cut short", r#"{"weight_map":{"a":"one.safe"#, "EOF"),
    ];
    for (case, index, said) in cases {
        let error = open_index(index).expect_err(case);
        assert!(matches!(error, Error::Index { .. }), "{case}: {error}");
        assert!(error.to_string().contains(said), "{case}: {error}");
    }
}

#[test]
fn an_index_cannot_lead_out_of_its_folder() {
    for shard in [
        "../outside.safetensors",
        "../inner/one.safetensors",
        "./one.safetensors",
        "one.safetensors/",
        "/etc/passwd",
        "sub/one.safetensors",
        "..",
        ".",
        "",
    ] {
        let error = open_index(&format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#)).expect_err(shard);
        assert!(
            matches!(&error, Error::ShardOutsideFolder { shard: named, tensor, .. } if named == shard && tensor == "a"),
            "{shard}: {error}"
        );
    }
}

#[test]
fn an_index_that_disagrees_with_its_files_is_refused() {
    let missing =
        open_index(r#"{"weight_map":{"a":"one.safetensors","z":"three.safetensors"}}"#).unwrap_err();
    assert!(
        matches!(&missing, Error::MissingShard { shard, tensors: 1, .. } if shard == "three.safetensors"),
        "{missing}"
    );

    let absent = open_index(r#"{"weight_map":{"a":"one.safetensors","z":"two.safetensors"}}"#).unwrap_err();
    assert!(matches!(&absent, Error::NotInShard { tensor, .. } if tensor == "z"), "{absent}");

    let elsewhere =
        open_index(r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#).unwrap_err();
    assert!(matches!(&elsewhere, Error::NotInShard { tensor, .. } if tensor == "b"), "{elsewhere}");

    let twice = open_index(r#"{"weight_map":{"a":"one.safetensors","d":"copy.safetensors"}}"#).unwrap_err();
    assert!(matches!(&twice, Error::InTwoShards { tensor, .. } if tensor == "b"), "{twice}");
}

#[test]
fn what_is_no_regular_file_is_refused_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("model.safetensors");
    fs::create_dir(&weights).unwrap();
    let error = SafetensorsFolder::open(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if *path == weights), "{error}");
    fs::remove_dir(&weights).unwrap();

    let made = std::process::Command::new("mkfifo").arg(&weights).status().unwrap();
    assert!(made.success());
    let error = SafetensorsFolder::open(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if *path == weights), "{error}");
}

#[test]
fn a_folder_without_weights_says_what_it_wants() {
    let folder = tempfile::tempdir().unwrap();
    let error = SafetensorsFolder::open(folder.path()).unwrap_err();
    assert!(matches!(error, Error::NoWeights { .. }), "{error}");
    let error = SafetensorsFolder::open(folder.path().join("none")).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("none")), "{error}");
}

#[test]
fn links_to_the_cache_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (folder.path().join("blobs"), folder.path().join("snapshot"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir(&snapshot).unwrap();
    put_scalars(&blobs, "0123", &["a"]);
    std::os::unix::fs::symlink("../blobs/0123", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(SafetensorsFolder::open(&snapshot).unwrap().names().count(), 1);
}
