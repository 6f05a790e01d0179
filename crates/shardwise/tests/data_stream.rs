//! Token streams: one sequence whatever holds it, checked against the vocabulary and told apart by a hash.

use std::fs;

use proptest::prelude::*;
use shardwise::data::{Corpus, DataError, Fingerprint, TokenStream, TokenWidth, Tokenizer};
use tempfile::TempDir;

/// Writes `parts` as token files `00`, `01`, ... and opens them as one stream.
fn token_files(parts: &[&[u32]], width: TokenWidth) -> (TempDir, TokenStream) {
    let folder = tempfile::tempdir().unwrap();
    for (index, part) in parts.iter().enumerate() {
        let bytes: Vec<u8> = match width {
            TokenWidth::U8 => part.iter().map(|token| *token as u8).collect(),
            TokenWidth::U16 => part.iter().flat_map(|token| (*token as u16).to_le_bytes()).collect(),
            TokenWidth::U32 => part.iter().flat_map(|token| token.to_le_bytes()).collect(),
        };
        fs::write(folder.path().join(format!("{index:02}")), bytes).unwrap();
    }
    let stream = TokenStream::from_token_files(&[folder.path().display().to_string()], width).unwrap();
    (folder, stream)
}

/// The bytes of `text` as a stream in memory.
fn text_stream(text: &[u8]) -> TokenStream {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text");
    fs::write(&file, text).unwrap();
    let corpus = Corpus::from_paths(&[file.display().to_string()]).unwrap();
    TokenStream::from_text(&corpus, &Tokenizer::bytes()).unwrap()
}

fn read(stream: &TokenStream, start: u64, count: usize) -> Vec<u32> {
    let mut tokens = vec![u32::MAX; count];
    stream.read(start, &mut tokens).unwrap();
    tokens
}

fn fingerprint(stream: &TokenStream) -> Fingerprint {
    stream.fingerprint().unwrap()
}

#[test]
fn files_are_little_endian_and_follow_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("b"), [1, 0, 2, 1, 255, 255, 0, 0]).unwrap();
    fs::write(path("a"), [7, 0, 0, 128]).unwrap();
    for (paths, width, expected) in [
        (vec![path("b"), path("a")], TokenWidth::U16, vec![1, 0x102, 0xffff, 0, 7, 0x8000]),
        (vec![path("*")], TokenWidth::U16, vec![7, 0x8000, 1, 0x102, 0xffff, 0]),
        (vec![path("a"), path("b")], TokenWidth::U8, vec![7, 0, 0, 128, 1, 0, 2, 1, 255, 255, 0, 0]),
        (vec![path("b"), path("a")], TokenWidth::U32, vec![0x0102_0001, 0xffff, 0x8000_0007]),
    ] {
        let stream = TokenStream::from_token_files(&paths, width).unwrap();
        assert_eq!(read(&stream, 0, stream.len() as usize), expected, "{paths:?} {width:?}");
    }
}

proptest! {
    #[test]
    fn any_range_reads_the_same_across_any_files(
        parts in prop::collection::vec(prop::collection::vec(0u32..65_536, 0..40), 1..8),
        ends in (0.0..=1.0, 0.0..=1.0),
    ) {
        let whole = parts.concat();
        let mut range = [ends.0, ends.1].map(|end: f64| (end * whole.len() as f64) as usize);
        range.sort_unstable();
        let slices: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
        for width in [TokenWidth::U16, TokenWidth::U32] {
            let (_folder, stream) = token_files(&slices, width);
            prop_assert_eq!(stream.len(), whole.len() as u64);
            prop_assert_eq!(
                read(&stream, range[0] as u64, range[1] - range[0]),
                &whole[range[0]..range[1]]
            );
        }
    }
}

#[test]
fn a_file_that_is_no_whole_number_of_tokens_is_refused() {
    for (width, bytes, unit) in [(TokenWidth::U16, 5, 2), (TokenWidth::U32, 10, 4), (TokenWidth::U32, 3, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.bin");
        fs::write(&path, vec![0; bytes]).unwrap();
        let error =
            TokenStream::from_token_files(&[path.display().to_string()], width).unwrap_err().to_string();
        for part in ["tokens.bin", &format!("multiple of {unit} bytes"), &format!("found {bytes} bytes")] {
            assert!(error.contains(part), "expected `{part}` in: {error}");
        }
    }
}

#[test]
fn a_file_that_shrinks_is_an_error_and_not_a_wrong_token() {
    let (folder, stream) = token_files(&[&[1, 2, 3, 4]], TokenWidth::U16);
    fs::write(folder.path().join("00"), [1, 0]).unwrap();
    let error = stream.read(1, &mut [0; 3]).unwrap_err().to_string();
    assert!(error.contains("could not read 6 bytes at offset 2") && error.contains("shortened"), "{error}");
}

#[test]
fn a_token_beyond_the_vocabulary_is_named_with_its_place() {
    let long: Vec<u32> = (0..100_000).map(|token| if token == 77_777 { 500 } else { 3 }).collect();
    let three: &[&[u32]] = &[&[0, 1], &[], &[1, 9, 8]];
    for (parts, vocab_size, expected) in [
        (&three[..1], 2, None),
        (three, 10, None),
        (three, 9, Some(("02", 1, 9))),
        (three, 1, Some(("00", 1, 1))),
        (&[&[1], &long], 500, Some(("01", 77_777, 500))),
        (&[&[1], &long], 501, None),
    ] {
        let (_folder, stream) = token_files(parts, TokenWidth::U32);
        match (stream.check_vocab(vocab_size, 0..stream.len()), expected) {
            (Ok(()), None) => {}
            (Err(DataError::Vocabulary { place, position, token, .. }), Some((file, at, id))) => {
                assert!(place.ends_with(file), "{place} instead of {file}");
                assert_eq!((position, token), (at, id), "in {file}");
            }
            (result, expected) => panic!("vocabulary of {vocab_size}: {result:?} instead of {expected:?}"),
        }
    }
    let error = text_stream(b"abc").check_vocab(99, 0..3).unwrap_err().to_string();
    for part in ["vocabulary of 99", "found 99 at token 2", "raise the model's vocab_size"] {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
    text_stream(b"abc").check_vocab(99, 0..2).unwrap();
}

#[test]
fn fingerprints_are_of_the_tokens_and_not_of_what_holds_them() {
    let text = b"to be, or not to be";
    let tokens: Vec<u32> = text.iter().map(|byte| u32::from(*byte)).collect();
    let expected = fingerprint(&text_stream(text));
    assert_eq!(expected.tokens, text.len() as u64);
    let (head, tail) = tokens.split_at(7);
    for parts in [&[&tokens[..]][..], &[head, tail]] {
        for width in [TokenWidth::U16, TokenWidth::U32] {
            assert_eq!(fingerprint(&token_files(parts, width).1), expected);
        }
    }
    let (_, empty) = token_files(&[&[]], TokenWidth::U16);
    assert!(empty.is_empty() && fingerprint(&empty).tokens == 0);
}

#[test]
fn one_token_more_less_or_other_is_another_fingerprint() {
    let text = vec![b'a'; 40_000];
    let original = fingerprint(&text_stream(&text));
    for changed in [0, 1, 16_383, 16_384, 39_999] {
        let mut other = text.clone();
        other[changed] = b'b';
        assert_ne!(fingerprint(&text_stream(&other)), original, "token {changed}");
    }
    assert_ne!(fingerprint(&text_stream(&text[1..])).hash, original.hash);
    let swapped = (fingerprint(&text_stream(b"ab")), fingerprint(&text_stream(b"ba")));
    assert_ne!(swapped.0, swapped.1, "order counts");
}

#[test]
fn a_fingerprint_samples_a_long_stream_from_end_to_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    let tokens: u64 = 20_000_003;
    let file = fs::File::create(&path).unwrap();
    file.set_len(tokens * 2).unwrap();
    let stream = TokenStream::from_token_files(&[path.display().to_string()], TokenWidth::U16).unwrap();
    let original = fingerprint(&stream);
    for changed in [tokens - 1, tokens - 2] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[1, 0], changed * 2).unwrap();
        assert_ne!(fingerprint(&stream), original, "token {changed}");
        std::os::unix::fs::FileExt::write_all_at(&file, &[0, 0], changed * 2).unwrap();
        assert_eq!(fingerprint(&stream), original);
    }
}
