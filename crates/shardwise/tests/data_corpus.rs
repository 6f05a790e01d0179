//! Text files: which are taken, in which order, as what text, and what is said when that cannot be.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use shardwise::data::{Corpus, DataConfig, DataError, Format, SamplerKind};
use tempfile::TempDir;

/// A folder with the given files, and whatever folders they need.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    root
}

/// `names` below `root`, as a user writes them.
fn below(root: &Path, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| root.join(name).display().to_string()).collect()
}

fn text_of(corpus: &Corpus) -> String {
    let mut text = String::new();
    let append = |piece: &str| {
        text.push_str(piece);
        Ok(())
    };
    corpus.for_each_piece(append).unwrap();
    text
}

#[test]
fn paths_name_files_folders_and_patterns() {
    let names = ["b.txt", "a.txt", "c.md", "d/z.txt", "d/e/y.txt", ".hidden.txt", "d/.git/x.txt"];
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, name.as_bytes())).collect();
    let root = folder(&files);
    let cases: &[(&[&str], &[&str])] = &[
        (&["c.md"], &["c.md"]),
        (&["."], &["a.txt", "b.txt", "c.md", "d/e/y.txt", "d/z.txt"]),
        (&["d"], &["d/e/y.txt", "d/z.txt"]),
        (&["d/", "a.txt"], &["d/e/y.txt", "d/z.txt", "a.txt"]),
        (&["*.txt"], &["a.txt", "b.txt"]),
        (&["?.md"], &["c.md"]),
        (&["[!b].txt"], &["a.txt"]),
        (&["**/*.txt"], &["a.txt", "b.txt", "d/e/y.txt", "d/z.txt"]),
        (&["*/*.txt"], &["d/z.txt"]),
        (&["d/e*"], &["d/e/y.txt"]),
        (&["b.txt", "*.txt", "b.txt"], &["b.txt", "a.txt"]),
        (&[".hidden.txt"], &[".hidden.txt"]),
    ];
    for (paths, expected) in cases {
        let corpus = Corpus::from_paths(&below(root.path(), paths)).unwrap();
        let found: Vec<_> =
            corpus.files().iter().map(|file| file.strip_prefix(root.path()).unwrap()).collect();
        let expected: Vec<&Path> = expected.iter().map(Path::new).collect();
        assert_eq!(found, expected, "{paths:?}");
    }
}

#[test]
fn files_are_joined_by_an_empty_line_and_changed_in_nothing() {
    let root = folder(&[("1", b"one\r\n"), ("2", b""), ("3", "\u{feff}drei \u{1f980}".as_bytes())]);
    let corpus = Corpus::from_paths(&below(root.path(), &["."])).unwrap();
    assert_eq!(text_of(&corpus), "one\r\n\n\n\n\n\u{feff}drei \u{1f980}");
    let alone = Corpus::from_paths(&below(root.path(), &["1"])).unwrap();
    assert_eq!((text_of(&alone).as_str(), alone.origin()), ("one\r\n", &*below(root.path(), &["1"])[0]));
}

#[test]
fn large_files_come_in_bounded_pieces_that_end_with_a_line_before_text() {
    let lines: String =
        (0..60_000).map(|line| format!("line {line} \u{e9}\u{1f980}\n\n  indented\n")).collect();
    let long_line = "\u{1f980}".repeat(300_000);
    let blank = "\n \t".repeat(300_000);
    for (name, text, ends_with_a_line) in
        [("lines", &lines, true), ("one long line", &long_line, false), ("blank lines", &blank, false)]
    {
        let root = folder(&[("text", text.as_bytes())]);
        let corpus = Corpus::from_paths(&below(root.path(), &["text"])).unwrap();
        let (mut joined, mut pieces) = (String::new(), 0);
        corpus
            .for_each_piece(|piece| {
                assert!(piece.len() <= 512 << 10, "{name}: a piece of {} bytes", piece.len());
                let at_text = text[joined.len()..].starts_with(|first: char| !first.is_whitespace());
                assert!(!ends_with_a_line || at_text, "{name}: piece {pieces} starts with white space");
                joined.push_str(piece);
                pieces += 1;
                Ok(())
            })
            .unwrap();
        assert!(joined == *text, "{name}: the pieces are not the text");
        assert!(pieces > 2, "{name}: only {pieces} pieces");
    }
}

#[test]
fn invalid_utf8_is_refused_with_file_and_offset() {
    let far: Vec<u8> = [vec![b'a'; 700_001], vec![0xff], vec![b'b'; 10]].concat();
    let across: Vec<u8> = [vec![b'a'; (256 << 10) - 1], vec![0xc3, 0x28]].concat();
    let cases: [(&str, &[u8], u64); 5] = [
        ("first.bin", b"\xffabc", 0),
        ("middle.bin", b"ab\xc3(c", 2),
        ("cut.bin", b"caf\xc3", 3),
        ("far.bin", &far, 700_001),
        ("across.bin", &across, (256 << 10) - 1),
    ];
    for (name, bytes, expected) in cases {
        let root = folder(&[(name, bytes)]);
        let corpus = Corpus::from_paths(&below(root.path(), &[name])).unwrap();
        let error = corpus.for_each_piece(|_| Ok(())).unwrap_err();
        let DataError::NotUtf8 { file, offset } = error else { panic!("{name}: {error}") };
        assert_eq!((file, offset), (root.path().join(name), expected));
    }
}

#[test]
fn links_to_files_are_followed_and_links_to_folders_are_not() {
    let root = folder(&[("data/a.txt", b"a"), ("elsewhere/b.txt", b"b")]);
    let data = root.path().join("data");
    symlink("../elsewhere/b.txt", data.join("b.txt")).unwrap();
    symlink("..", data.join("loop")).unwrap();
    symlink("../elsewhere", data.join("linked")).unwrap();
    for paths in [&["data"], &["data/**/*.txt"]] {
        let corpus = Corpus::from_paths(&below(root.path(), paths)).unwrap();
        assert_eq!(text_of(&corpus), "a\n\nb", "{paths:?}");
    }
    symlink("data", root.path().join("named")).unwrap();
    let named = Corpus::from_paths(&below(root.path(), &["named"])).unwrap();
    assert_eq!(named.files().len(), 2, "a link that the user names is followed");
}

/// A link that leads nowhere matters only to those who name it, alone or by its folder.
#[test]
fn a_pattern_is_not_disturbed_by_links_beside_its_files() {
    let root = folder(&[("a.txt", b"a"), ("sub/b.txt", b"b")]);
    symlink("nowhere", root.path().join("broken.bin")).unwrap();
    symlink("nowhere", root.path().join("sub/broken")).unwrap();
    for (pattern, files) in [("*.txt", 1), ("**/*.txt", 2), ("s*/*.txt", 1)] {
        let corpus = Corpus::from_paths(&below(root.path(), &[pattern])).unwrap();
        assert_eq!(corpus.files().len(), files, "{pattern}");
    }
    for paths in [["*.bin"], ["."]] {
        let error = Corpus::from_paths(&below(root.path(), &paths)).unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains("could not follow the link"), "{error}");
    }
}

#[test]
fn a_file_counts_once_under_all_its_names() {
    let root = folder(&[("a.txt", b"a"), ("sub/b.txt", b"b")]);
    symlink("a.txt", root.path().join("z.txt")).unwrap();
    let paths =
        below(root.path(), &["a.txt", "./a.txt", "sub/../a.txt", "z.txt", "*.txt", "sub", "sub/b.txt"]);
    let corpus = Corpus::from_paths(&paths).unwrap();
    assert_eq!(corpus.files(), [root.path().join("a.txt"), root.path().join("sub/b.txt")]);
}

#[test]
fn errors_say_what_was_searched_and_what_to_do() {
    let root = folder(&[("empty/.hidden", b"x"), ("a.txt", b"a")]);
    let cases: &[(&[&str], &[&str])] = &[
        (&["missing.txt"], &["missing.txt", "could not open it", "check the path"]),
        (&["missing/*.txt"], &["missing", "could not list the folder"]),
        (&["empty"], &["expected at least one file, found none", "empty", "hidden files"]),
        (&["*.json", "empty"], &["found none", "*.json", "empty"]),
        (&["a[.txt"], &["expected a file, a folder or a pattern", "a[.txt"]),
    ];
    for (paths, parts) in cases {
        let error = Corpus::from_paths(&below(root.path(), paths)).unwrap_err().to_string();
        for part in *parts {
            assert!(error.contains(part), "{paths:?}: expected `{part}` in: {error}");
        }
    }
    let error = Corpus::from_paths(&["/dev/null".to_owned()]).unwrap_err();
    assert!(matches!(error, DataError::NotAFile { .. }), "{error}");
}

#[test]
fn configuration_is_read_as_documented() {
    let read = |text: &str| toml::from_str::<DataConfig>(text);
    assert_eq!(read("").unwrap(), DataConfig::default());
    assert_eq!(read("path = 'a'").unwrap().path, ["a"]);
    assert_eq!(read("path = ['a', 'b/*']").unwrap().path, ["a", "b/*"]);
    let all = "path = 'a'\nformat = 'tokens-u16'\ntokenizer = 't.json'\nseq_len = 8\nsampler = 'sequential'";
    let expected = DataConfig {
        path: vec!["a".into()],
        format: Format::TokensU16,
        tokenizer: Some("t.json".into()),
        seq_len: Some(8),
        sampler: SamplerKind::Sequential,
    };
    assert_eq!(read(all).unwrap(), expected);
    assert_eq!(read(&toml::to_string(&expected).unwrap()).unwrap(), expected);
    for (text, part) in [
        ("path = []", "leave `path` out for the default corpus"),
        ("path = 3", "expected a path, or a list of paths"),
        ("format = 'tokens-u8'", "tokens-u16"),
        ("sampler = 'random'", "shuffled"),
        ("paths = 'a'", "unknown field `paths`"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: expected `{part}` in: {error}");
    }
}
