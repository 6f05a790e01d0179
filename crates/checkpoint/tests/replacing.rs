//! Replacing: at every moment a folder is the old one or the new one, complete; nobody else's files are
//! touched.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{listing, read_simple, spec, write_simple};
use shardwise_checkpoint::{Error, FloatType, FolderWriter, StoredLayout};

/// Where a child process of a test is told the folder to write.
const CHILD_FOLDER: &str = "SHARDWISE_TEST_CHILD_FOLDER";

/// Starts one of the ignored tests of this file in a process of its own.
fn child(test: &str, folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(CHILD_FOLDER, folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The folder that this process was started for.
fn child_folder() -> Option<PathBuf> {
    std::env::var_os(CHILD_FOLDER).map(PathBuf::from)
}

fn start(folder: &Path) -> FolderWriter {
    let plan = vec![spec("w", &[3], FloatType::F32), spec("v", &[2], FloatType::F32)];
    FolderWriter::create(folder, plan, 8).unwrap()
}

#[test]
fn a_folder_appears_when_finished_and_not_before() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    let mut writer = start(&folder);
    writer.write("w", &[1.0; 3], StoredLayout::AsIs).unwrap();
    writer.write("v", &[1.0; 2], StoredLayout::AsIs).unwrap();
    assert!(!folder.exists());
    writer.finish().unwrap();
    assert_eq!(listing(parent.path()), ["m"]);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    fs::create_dir(parent.path().join("usual")).unwrap();
    assert_eq!(mode(&folder), mode(&parent.path().join("usual")), "others may read it as any folder");
}

#[test]
fn a_dropped_writer_leaves_nothing_and_touches_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    drop(start(&folder));
    assert!(listing(parent.path()).is_empty());

    write_simple(&folder, &[1.0, 2.0]);
    let mut writer = start(&folder);
    writer.write("w", &[9.0; 3], StoredLayout::AsIs).unwrap();
    writer.add_file("config.json", b"new").unwrap();
    drop(writer);
    assert_eq!(listing(parent.path()), ["m"]);
    assert_eq!(read_simple(&folder), [1.0, 2.0]);
}

#[test]
fn a_model_folder_is_replaced_whole() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    fs::create_dir(&folder).unwrap();
    write_simple(&folder, &[1.0]);
    let mut writer = start(&folder);
    writer.write("w", &[2.0; 3], StoredLayout::AsIs).unwrap();
    writer.write("v", &[2.0; 2], StoredLayout::AsIs).unwrap();
    writer.finish().unwrap();
    assert_eq!(read_simple(&folder), [2.0; 3]);
    assert_eq!(listing(&folder).len(), 3, "two files and an index; the old config.json is gone");
    write_simple(&folder, &[3.0]);
    assert_eq!(listing(&folder), ["config.json", "model.safetensors"]);
    assert_eq!(listing(parent.path()), ["m"]);
}

#[test]
fn a_relative_path_stays_what_it_was_at_the_start() {
    let parent = tempfile::tempdir().unwrap();
    // The working folder belongs to the whole process, so this runs in one of its own.
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_writes_relative", "--ignored"])
        .env(CHILD_FOLDER, "m")
        .current_dir(parent.path())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(listing(parent.path()), ["m"]);
}

#[test]
#[ignore = "started by a_relative_path_stays_what_it_was_at_the_start"]
fn child_writes_relative() {
    let Some(folder) = child_folder() else { return };
    let mut writer = start(&folder);
    std::env::set_current_dir("/").unwrap();
    writer.write("w", &[2.0; 3], StoredLayout::AsIs).unwrap();
    writer.write("v", &[2.0; 2], StoredLayout::AsIs).unwrap();
    writer.finish().unwrap();
}

#[test]
fn what_is_no_model_folder_is_never_replaced() {
    type Make = fn(&Path);
    let cases: [(&str, Make); 8] = [
        ("a file", |path| fs::write(path, "text").unwrap()),
        ("a folder of notes", |path| {
            fs::create_dir(path).unwrap();
            fs::write(path.join("notes.txt"), "text").unwrap();
        }),
        ("a model with a note", |path| {
            write_simple(path, &[1.0]);
            fs::write(path.join("notes.txt"), "text").unwrap();
        }),
        ("a model with older weights", |path| {
            write_simple(path, &[1.0]);
            fs::write(path.join("pytorch_model.bin"), "text").unwrap();
        }),
        ("a model with a folder", |path| {
            write_simple(path, &[1.0]);
            fs::create_dir(path.join("runs")).unwrap();
        }),
        ("a model with a folder of a known name", |path| {
            write_simple(path, &[1.0]);
            fs::create_dir(path.join("tokenizer.json")).unwrap();
        }),
        ("a tokenizer alone", |path| {
            fs::create_dir(path).unwrap();
            fs::write(path.join("tokenizer.json"), "{}").unwrap();
        }),
        ("a link to a model", |path| {
            let other = path.with_file_name("other");
            write_simple(&other, &[1.0]);
            symlink(other, path).unwrap();
        }),
    ];
    for (case, make) in cases {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("m");
        make(&folder);
        let before = listing(parent.path());
        let error = FolderWriter::create(&folder, vec![spec("w", &[1], FloatType::F32)], 8).unwrap_err();
        assert!(
            matches!(&error, Error::NotAModelFolder { folder: named, .. } if *named == folder),
            "{error}"
        );
        assert_eq!(listing(parent.path()), before, "{case}");

        // The same when it comes while the folder is being written.
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("m");
        let mut writer = start(&folder);
        writer.write("w", &[1.0; 3], StoredLayout::AsIs).unwrap();
        writer.write("v", &[1.0; 2], StoredLayout::AsIs).unwrap();
        make(&folder);
        let error = writer.finish().unwrap_err();
        assert!(matches!(error, Error::NotAModelFolder { .. }), "{case}: {error}");
        assert_eq!(listing(parent.path()), before, "{case}");
    }
    let error = FolderWriter::create("/", vec![spec("w", &[1], FloatType::F32)], 8).unwrap_err();
    assert!(matches!(error, Error::NotAModelFolder { .. }), "{error}");
}

#[test]
fn a_process_that_aborts_leaves_the_old_folder_and_the_next_writer_cleans_up() {
    for test in
        ["child_aborts_before_any_tensor", "child_aborts_between_tensors", "child_aborts_when_all_is_written"]
    {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("m");
        write_simple(&folder, &[1.0, 2.0]);
        let status = child(test, &folder).wait().unwrap();
        assert!(!status.success(), "{test}");
        assert_eq!(listing(parent.path()).len(), 2, "{test}: the folder, and what the dead process left");
        assert_eq!(read_simple(&folder), [1.0, 2.0], "{test}");

        write_simple(&folder, &[3.0]);
        assert_eq!(listing(parent.path()), ["m"], "{test}");
        assert_eq!(read_simple(&folder), [3.0], "{test}");
    }
}

#[test]
#[ignore = "started by a_process_that_aborts_leaves_the_old_folder_and_the_next_writer_cleans_up"]
fn child_aborts_before_any_tensor() {
    let Some(folder) = child_folder() else { return };
    let _writer = start(&folder);
    std::process::abort();
}

#[test]
#[ignore = "started by a_process_that_aborts_leaves_the_old_folder_and_the_next_writer_cleans_up"]
fn child_aborts_between_tensors() {
    let Some(folder) = child_folder() else { return };
    let mut writer = start(&folder);
    writer.write("w", &[9.0; 3], StoredLayout::AsIs).unwrap();
    std::process::abort();
}

#[test]
#[ignore = "started by a_process_that_aborts_leaves_the_old_folder_and_the_next_writer_cleans_up"]
fn child_aborts_when_all_is_written() {
    let Some(folder) = child_folder() else { return };
    let mut writer = start(&folder);
    writer.write("w", &[9.0; 3], StoredLayout::AsIs).unwrap();
    writer.write("v", &[9.0; 2], StoredLayout::AsIs).unwrap();
    writer.add_file("config.json", b"new").unwrap();
    std::process::abort();
}

#[test]
fn a_process_killed_at_any_moment_leaves_a_complete_folder() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    write_simple(&folder, &[0.0; 1000]);
    let inode = || fs::metadata(&folder).expect("the folder is there at every moment").ino();
    for round in 0..25 {
        let before = inode();
        let mut writer = child("child_replaces_on_and_on", &folder);
        let deadline = Instant::now() + Duration::from_secs(10);
        while inode() == before {
            assert!(Instant::now() < deadline, "the child replaces nothing");
        }
        // Somewhere within the replacements that follow the first.
        std::thread::sleep(Duration::from_micros(150 * round));
        writer.kill().unwrap();
        writer.wait().unwrap();
        let values = read_simple(&folder);
        assert_eq!(values.len(), 1000);
        assert!(values.iter().all(|value| *value == values[0]), "round {round}: a mixture");
        assert_eq!(listing(&folder), ["config.json", "model.safetensors"], "round {round}");
    }
    write_simple(&folder, &[1.0]);
    assert_eq!(listing(parent.path()), ["m"], "all leftovers are gone");
}

#[test]
#[ignore = "started by a_process_killed_at_any_moment_leaves_a_complete_folder"]
fn child_replaces_on_and_on() {
    let Some(folder) = child_folder() else { return };
    let start = Instant::now();
    let mut value = 1.0;
    while start.elapsed() < Duration::from_secs(10) {
        write_simple(&folder, &[value; 1000]);
        value += 1.0;
    }
}

#[test]
fn cleaning_up_spares_live_writers_and_what_only_looks_like_a_leftover() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    let make = |name: &str, file: &str| {
        fs::create_dir(parent.path().join(name)).unwrap();
        fs::write(parent.path().join(name).join(file), "x").unwrap();
    };
    make(".m.shardwise-abc123.tmp", "model.safetensors");
    make(".m.shardwise-abc124.tmp", "model.safetensors");
    fs::write(parent.path().join(".m.shardwise-abc124.tmp/diary.txt"), "x").unwrap();
    make(".m.shardwise-abc12.tmp", "model.safetensors");
    make(".n.shardwise-abc123.tmp", "model.safetensors");
    fs::write(parent.path().join(".m.shardwise-abc125.tmp"), "a file").unwrap();
    let mut live = start(&folder);

    write_simple(&folder, &[1.0]);
    let left = listing(parent.path());
    let expected = [
        ".m.shardwise-abc12.tmp",
        ".m.shardwise-abc124.tmp",
        ".m.shardwise-abc125.tmp",
        ".n.shardwise-abc123.tmp",
        "m",
    ];
    assert!(expected.iter().all(|name| left.contains(&(*name).to_owned())), "{left:?}");
    assert_eq!(left.len(), expected.len() + 1, "and the live writer's folder: {left:?}");
    assert_eq!(listing(&parent.path().join(".m.shardwise-abc124.tmp")), ["diary.txt", "model.safetensors"]);

    live.write("w", &[2.0; 3], StoredLayout::AsIs).unwrap();
    live.write("v", &[2.0; 2], StoredLayout::AsIs).unwrap();
    live.finish().unwrap();
    assert_eq!(read_simple(&folder), [2.0; 3], "the last to finish wins");
}

#[test]
fn writers_of_one_folder_at_once_all_succeed() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("m");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let folder = &folder;
            scope.spawn(move || {
                for round in 0..10 {
                    write_simple(folder, &[(10 * thread + round) as f32; 100]);
                }
            });
        }
    });
    let values = read_simple(&folder);
    assert!(values.iter().all(|value| *value == values[0]));
    write_simple(&folder, &[1.0]);
    assert_eq!(listing(parent.path()), ["m"]);
}
