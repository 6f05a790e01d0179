//! Disk errors: what the system refuses is reported with file and reason, and costs nothing that was there
//! before.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{listing, read, read_simple, spec, write_simple};
use shardwise_checkpoint::{Error, FloatType, FolderWriter, SafetensorsFolder, StoredLayout};

/// Where a child process of a test is told the folder to write.
const CHILD_FOLDER: &str = "SHARDWISE_TEST_CHILD_FOLDER";

fn create(folder: &Path) -> Result<FolderWriter, Error> {
    FolderWriter::create(folder, vec![spec("w", &[100_000], FloatType::F32)], u64::MAX)
}

#[test]
fn a_file_shortened_after_opening_is_an_error_and_no_signal() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    write_simple(&folder, &[1.0; 1000]);
    let weights = SafetensorsFolder::open(&folder).unwrap();
    let path = folder.join("model.safetensors");
    let length = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();

    assert_eq!(read(&weights, "w", 0..999, StoredLayout::AsIs).unwrap(), [1.0; 999]);
    let error = read(&weights, "w", 999..1000, StoredLayout::AsIs).unwrap_err();
    assert!(matches!(&error, Error::Io { path: named, .. } if *named == path), "{error}");
    assert!(error.to_string().contains("read 4 bytes at offset"), "{error}");
    assert!(error.to_string().contains("shortened"), "{error}");
}

#[test]
fn an_open_folder_keeps_its_files_when_it_is_replaced() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    write_simple(&folder, &[1.0; 10]);
    let weights = SafetensorsFolder::open(&folder).unwrap();
    write_simple(&folder, &[2.0; 10]);
    assert_eq!(read(&weights, "w", 0..10, StoredLayout::AsIs).unwrap(), [1.0; 10]);
    assert_eq!(read_simple(&folder), [2.0; 10]);
}

#[test]
fn a_parent_that_is_missing_or_a_file_is_named() {
    let parent = tempfile::tempdir().unwrap();
    fs::write(parent.path().join("file"), "x").unwrap();
    for inner in ["missing/m", "file/m"] {
        let error = create(&parent.path().join(inner)).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains(inner.split_once('/').unwrap().0), "{error}");
    }
    assert_eq!(listing(parent.path()), ["file"]);
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let parent = tempfile::tempdir().unwrap();
    let locked = parent.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    // The superuser may write there all the same; /proc refuses that one too.
    let is_superuser = fs::write(locked.join("probe"), "x").is_ok();
    let target = if is_superuser { PathBuf::from("/proc/m") } else { locked.join("m") };
    let error = create(&target).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if Some(path.as_path()) == target.parent()), "{error}");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_disk_that_fills_up_costs_the_new_folder_and_not_the_old() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    write_simple(&folder, &[1.0; 10]);
    // A limit on the size of files stands in for a full disk: the write stops short in the same way.
    let status = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" --exact child_meets_the_limit --ignored"])
        .arg(std::env::current_exe().unwrap())
        .env(CHILD_FOLDER, &folder)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "the child saw the error that it should");
    assert_eq!(listing(parent.path()), ["m"]);
    assert_eq!(read_simple(&folder), [1.0; 10]);
}

#[test]
#[ignore = "started by a_disk_that_fills_up_costs_the_new_folder_and_not_the_old"]
fn child_meets_the_limit() {
    let Some(folder) = std::env::var_os(CHILD_FOLDER).map(PathBuf::from) else { return };
    let mut writer = create(&folder).unwrap();
    let error = writer.write("w", &[2.0; 100_000], StoredLayout::AsIs).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("model.safetensors")), "{error}");
    assert!(error.to_string().contains("write 400000 bytes at offset"), "{error}");
    assert!(error.to_string().contains("free space"), "{error}");
}
