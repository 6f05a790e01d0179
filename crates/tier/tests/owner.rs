//! Who owns a folder, and what of a dead owner's goes: our files of the same name, nothing else.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{KINDS, config, files, filled, pattern, temp};
use shardwise_tier::{Access, Place, RunFolder, Tier, TierConfig, TierError};

const BUFFER: usize = 64 << 10;
/// What this binary is to do as a child: see `child`.
const ROLE: &str = "SHARDWISE_TIER_TEST_ROLE";
const FOLDER: &str = "SHARDWISE_TIER_TEST_FOLDER";

/// Does nothing, unless this process was started by another test to be its child.
#[test]
fn child() {
    let (Ok(role), Some(folder)) = (std::env::var(ROLE), std::env::var_os(FOLDER)) else { return };
    let folder = PathBuf::from(folder);
    match role.as_str() {
        "own" => own(&folder),
        "limited" => write_past_a_limit(&folder),
        other => panic!("{other}"),
    }
}

/// Owns a run with tiles in it until it is killed.
fn own(folder: &Path) {
    let run = RunFolder::claim(folder, "killed").unwrap();
    let mut tier = Tier::open(config(KINDS[1], Some(run.path()), 2, BUFFER)).unwrap();
    for id in ["blocks.0.weight", "blocks.0.bias"] {
        let object = tier.create(id, 1).unwrap();
        let buffer = filled(tier.buffer().unwrap(), &pattern(0, BUFFER));
        tier.start_write(object, 0, buffer).unwrap();
    }
    tier.flush().unwrap();
    println!("ready");
    std::io::stdout().flush().unwrap();
    std::thread::sleep(std::time::Duration::from_secs(60));
}

fn spawn(role: &str, folder: &Path, shell: Option<&str>) -> Child {
    let binary = std::env::current_exe().unwrap();
    let arguments = ["child", "--exact", "--nocapture", "--test-threads=1"];
    let mut command = match shell {
        None => Command::new(binary),
        Some(script) => {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("{script} exec \"$0\" \"$@\"")]).arg(binary);
            command
        }
    };
    command.args(arguments).env(ROLE, role).env(FOLDER, folder).stdout(Stdio::piped()).spawn().unwrap()
}

fn wait_until_ready(child: &mut Child) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("ready")));
}

#[test]
fn a_killed_run_is_cleaned_up_by_its_next_and_nothing_else_is() {
    let dir = temp();
    let mut child = spawn("own", dir.path(), None);
    wait_until_ready(&mut child);
    let folder = dir.path().join("shardwise-killed");
    let rank = folder.join("rank-3");

    // While it lives it owns its folder.
    let error = RunFolder::claim(dir.path(), "killed").unwrap_err();
    let TierError::Owned { folder: named, owner } = &error else { panic!("{error}") };
    assert_eq!(*named, folder);
    assert!(owner.starts_with(&format!("{} ", child.id())) && owner.contains("killed"), "{error}");
    assert!(matches!(
        Tier::open(config(KINDS[1], Some(&folder), 2, BUFFER)).unwrap_err(),
        TierError::Owned { folder, .. } if folder == rank
    ));
    assert_eq!(files(&rank).len(), 3);

    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(files(&rank).len(), 3, "a killed process cleans nothing up");

    // What is not ours, by its name or its kind.
    let foreign = [folder.join("notes.txt"), rank.join("data.bin"), rank.join("x.tiles")];
    for file in &foreign {
        fs::write(file, "mine").unwrap();
    }
    let directory = rank.join("a-0123456789abcdef.tiles");
    fs::create_dir(&directory).unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("b-0123456789abcdef.tiles"), "mine").unwrap();
    symlink(&outside, folder.join("rank-4")).unwrap();
    // Another run's, dead as well.
    let other = dir.path().join("shardwise-other/rank-0");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("c-0123456789abcdef.tiles"), "theirs").unwrap();

    let run = RunFolder::claim(dir.path(), "killed").unwrap();
    let mut expected = foreign[1..].to_vec();
    expected.push(directory);
    expected.sort();
    assert_eq!(files(&rank), expected);
    drop(run);
    assert_eq!(files(&rank), expected);
    assert!(foreign[0].exists() && !folder.join("owner.lock").exists());
    assert_eq!(files(&outside).len(), 1);
    assert_eq!(files(&other).len(), 1);
}

#[test]
fn two_runs_of_one_name_are_one_too_many() {
    let dir = temp();
    let first = RunFolder::claim(dir.path(), "a/b").unwrap();
    assert!(first.path().file_name().unwrap().to_str().unwrap().starts_with("shardwise-a_b-"));
    let error = RunFolder::claim(dir.path(), "a/b").unwrap_err();
    assert!(error.to_string().contains(&format!("process {} (run \"a/b\")", std::process::id())), "{error}");
    let other = RunFolder::claim(dir.path(), "a_b").unwrap();
    assert_ne!(first.path(), other.path());
    drop(first);
    let again = RunFolder::claim(dir.path(), "a/b").unwrap();
    drop((again, other));
    assert_eq!(files(dir.path()).len(), 0);
}

#[test]
fn of_many_that_claim_at_once_one_at_a_time_owns() {
    let dir = temp();
    let (owners, claims) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..300 {
                    match RunFolder::claim(dir.path(), "contended") {
                        Ok(run) => {
                            assert_eq!(owners.fetch_add(1, Ordering::SeqCst), 0);
                            claims.fetch_add(1, Ordering::SeqCst);
                            owners.fetch_sub(1, Ordering::SeqCst);
                            drop(run);
                        }
                        Err(TierError::Owned { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    assert!(claims.load(Ordering::SeqCst) > 0);
    assert_eq!(files(dir.path()).len(), 0);
}

#[test]
fn the_run_s_folder_goes_with_the_last_that_uses_it() {
    let dir = temp();
    let run = RunFolder::claim(dir.path(), "run").unwrap();
    let mut tier = Tier::open(config(KINDS[3], Some(run.path()), 1, BUFFER)).unwrap();
    let object = tier.create("a", 1).unwrap();
    let path = run.path().to_path_buf();
    drop(run);
    // A rank that still lives keeps what it has.
    let buffer = filled(tier.buffer().unwrap(), &[7; 100]);
    tier.start_write(object, 0, buffer).unwrap();
    let buffer = tier.buffer().unwrap();
    let reading = tier.start_read(object, 0, buffer).unwrap();
    assert_eq!(tier.wait(reading).unwrap().as_slice(), [7; 100]);
    drop(tier);
    assert!(!path.exists());
}

#[test]
fn a_rank_that_outlives_its_run_is_waited_for_and_then_named() {
    let dir = temp();
    let run = RunFolder::claim(dir.path(), "run").unwrap();
    let open = |run: &RunFolder| Tier::open(config(KINDS[1], Some(run.path()), 1, BUFFER)).unwrap();
    let tier = open(&run);
    drop(run);
    let error = RunFolder::claim(dir.path(), "run").unwrap_err();
    let TierError::Owned { folder, owner } = &error else { panic!("{error}") };
    assert!(folder.ends_with("shardwise-run/rank-3") && owner.contains("rank 3"), "{error}");
    let ending = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        drop(tier);
    });
    let run = RunFolder::claim(dir.path(), "run").unwrap();
    drop(open(&run));
    ending.join().unwrap();
}

#[test]
fn paths_that_cannot_be_used() {
    let dir = temp();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let refused = |path: &Path, words: &str| {
        let error = RunFolder::claim(path, "run").unwrap_err();
        assert!(matches!(error, TierError::Folder { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(path.to_str().unwrap()) && text.contains(words), "{text}");
    };
    refused(&file, "a file of that name");
    refused(&dir.path().join("no/such"), "is not there");
    // Nobody may make a folder there.
    refused(Path::new("/proc"), "cannot create");
    // A file where the run's folder would be, and where the rank's would be.
    fs::write(dir.path().join("shardwise-run"), "").unwrap();
    let error = RunFolder::claim(dir.path(), "run").unwrap_err();
    assert!(error.to_string().contains("shardwise-run: a file of that name"), "{error}");
    fs::write(dir.path().join("rank-3"), "").unwrap();
    let error = Tier::open(config(KINDS[1], Some(dir.path()), 1, BUFFER)).unwrap_err();
    assert!(error.to_string().contains("rank-3: a file of that name"), "{error}");
    // The system's administrator writes to read-only folders.
    let folder = dir.path().join("read-only");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(folder.join("probe"), "").is_err() {
        let error = RunFolder::claim(&folder, "run").unwrap_err();
        assert!(error.to_string().contains("Permission denied"), "{error}");
    }
    // A folder that is missing is made where its parent is there.
    let made = dir.path().join("made");
    drop(RunFolder::claim(&made, "run").unwrap());
    assert_eq!(files(&made).len(), 0);
}

/// A limit of the system on the size of files, as a disk that ends in the middle of a write.
fn write_past_a_limit(folder: &Path) {
    for kind in common::file_kinds() {
        let mut tier = Tier::open(config(kind, Some(folder), 2, BUFFER)).unwrap();
        let object = tier.create("a", 3).unwrap();
        let mut written = Vec::new();
        let mut failed = None;
        for tile in 0..3 {
            let buffer = filled(tier.buffer().unwrap(), &pattern(tile, BUFFER));
            let result = tier.start_write(object, tile, buffer).and_then(|()| tier.flush());
            match result {
                Ok(()) => written.push(tile),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let error = failed.unwrap();
        assert!(
            matches!(&error, TierError::Io { rank: 3, access: Access::Write, cause, .. } if cause.contains("File too large")),
            "{error}"
        );
        for tile in written {
            let buffer = tier.buffer().unwrap();
            let reading = tier.start_read(object, tile, buffer).unwrap();
            assert_eq!(tier.wait(reading).unwrap().as_slice(), pattern(tile, BUFFER));
        }
    }
    println!("every method was refused");
}

#[test]
fn a_limit_in_the_middle_of_a_file_is_an_error() {
    let dir = temp();
    // In blocks of 512 bytes: one tile and a half. The signal that goes with it would end the process.
    let child = spawn("limited", dir.path(), Some("trap '' XFSZ; ulimit -f 192;"));
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("every method was refused"), "{text}");
}

/// What lies behind a link in the place of a folder of ours is not ours to clean.
#[test]
fn a_link_in_the_place_of_our_folder_is_refused() {
    let (dir, elsewhere) = (temp(), temp());
    let kept = elsewhere.path().join("owner.lock");
    std::fs::write(&kept, "another's").unwrap();
    let folder = RunFolder::path_of(dir.path(), "run");
    std::os::unix::fs::symlink(elsewhere.path(), &folder).unwrap();
    let error = RunFolder::claim(dir.path(), "run").unwrap_err();
    assert!(error.to_string().contains("a link is in its place"), "{error}");
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "another's");
    // A path of the user's may be a link.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
    let run = RunFolder::claim(&link, "run").unwrap();
    let rank = RunFolder::rank_folder(run.path(), 0);
    std::os::unix::fs::symlink(dir.path(), &rank).unwrap();
    let opened = Tier::open(TierConfig {
        place: Place::Folder(rank),
        ..config(KINDS[3], Some(run.path()), 1, BUFFER)
    });
    assert!(opened.is_err());
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "another's");
}
