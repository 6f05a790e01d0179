//! Tokenizers: bytes are tokens, a `tokenizer.json` is obeyed and passed on, and both survive export.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use shardwise::data::{Corpus, DataError, TokenStream, Tokenizer};
use tempfile::TempDir;

/// Text of one, two, three and four bytes a character, controls, and what other tokenizers treat specially.
const TEXTS: &[&str] = &[
    "",
    "a",
    " leading, trailing ",
    "caf\u{e9} \u{4e16}\u{754c} \u{1f980}\u{200d}\u{a0}",
    "\0\x01\x7f\r\n\t\n\n",
    "<|endoftext|> </s> [CLS] ## \u{120} \u{10a}",
    "don't  e\u{301} \u{feff}x",
];

/// A folder with a tokenizer.json, and how a user names it.
fn saved(tokenizer: &Value) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    fs::write(&file, tokenizer.to_string()).unwrap();
    (folder, file.display().to_string())
}

/// A tokenizer of whole words, whose file asks for everything that must not happen to training text.
fn words(unknown: bool) -> Value {
    let mut vocab = json!({ "to": 0, "be": 1, "or": 2, "not": 3, "[CLS]": 4, "far": 70_000 });
    if unknown {
        vocab["[UNK]"] = json!(5);
    }
    json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 },
        "padding": {
            "strategy": { "Fixed": 8 }, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 3, "pad_type_id": 0, "pad_token": "not"
        },
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                { "SpecialToken": { "id": "[CLS]", "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } }
            ],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
            "special_tokens": { "[CLS]": { "id": "[CLS]", "ids": [4], "tokens": ["[CLS]"] } }
        },
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" }
    })
}

/// A byte-level BPE in the manner of GPT-2: its pattern joins white space across lines, and so do its merges.
fn gpt2_like() -> Value {
    let files: BTreeMap<String, Vec<u8>> = Tokenizer::bytes().companion_files().into_iter().collect();
    let mut tokenizer: Value = serde_json::from_slice(&files["tokenizer.json"]).unwrap();
    tokenizer["pre_tokenizer"]["use_regex"] = json!(true);
    let merges =
        ["\u{10a} \u{10a}", "\u{120} \u{120}", "\u{10a} \u{120}\u{120}", "t h", "th e", "\u{120} the"];
    for (id, merge) in (256..).zip(merges) {
        tokenizer["model"]["vocab"][merge.replace(' ', "")] = json!(id);
    }
    tokenizer["model"]["merges"] = json!(merges);
    tokenizer
}

#[test]
fn byte_tokens_are_the_bytes_and_decode_to_the_text() {
    let tokenizer = Tokenizer::open("bytes").unwrap();
    assert_eq!(tokenizer.vocab_size(), 256);
    for text in TEXTS {
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.iter().copied().eq(text.bytes().map(u32::from)), "{text:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), *text);
    }
}

#[test]
fn the_exported_byte_tokenizer_is_the_same_tokenizer() {
    let (bytes, folder) = (Tokenizer::bytes(), tempfile::tempdir().unwrap());
    for (name, content) in bytes.companion_files() {
        fs::write(folder.path().join(name), content).unwrap();
    }
    let exported = Tokenizer::open(&folder.path().join("tokenizer.json").display().to_string()).unwrap();
    assert_eq!(exported.vocab_size(), 256);
    // U+0000 to U+07FF have every byte that may follow another; the rest have every first byte.
    let mut all: String = (0..0x800).filter_map(char::from_u32).collect();
    all.extend((0x800..0x11_0000).step_by(0x3f1).filter_map(char::from_u32));
    for text in TEXTS.iter().copied().chain([&*all]) {
        let ids = bytes.encode(text).unwrap();
        assert!(exported.encode(text).unwrap() == ids, "{text:?}");
        assert!(exported.decode(&ids).unwrap() == text, "{text:?}");
    }
    for byte in 0..256 {
        assert_eq!(exported.decode(&[byte]).unwrap(), bytes.decode(&[byte]).unwrap(), "byte {byte}");
    }
    for ids in [&[0xc3, 0x28, 0x41][..], &[0x41, 256, 0x42, u32::MAX], &[0xf0, 0x9f, 0xa6]] {
        assert_eq!(exported.decode(ids).unwrap(), bytes.decode(ids).unwrap(), "{ids:?}");
    }
}

#[test]
fn every_byte_has_a_token_of_its_value() {
    let files: BTreeMap<String, Vec<u8>> = Tokenizer::bytes().companion_files().into_iter().collect();
    let json: Value = serde_json::from_slice(&files["tokenizer.json"]).unwrap();
    let vocab: BTreeMap<String, u32> = serde_json::from_value(json["model"]["vocab"].clone()).unwrap();
    let mut ids: Vec<u32> = vocab.values().copied().collect();
    ids.sort_unstable();
    assert!(ids.into_iter().eq(0..256));
    // The table of GPT-2, at its ends and seams.
    for (character, byte) in [
        ('!', 0x21),
        ('~', 0x7e),
        ('\u{a1}', 0xa1),
        ('\u{ff}', 0xff),
        ('\u{100}', 0),
        ('\u{10a}', b'\n'),
        ('\u{120}', b' '),
        ('\u{121}', 0x7f),
        ('\u{142}', 0xa0),
        ('\u{143}', 0xad),
    ] {
        assert_eq!(vocab[&character.to_string()], u32::from(byte), "byte {byte:#x}");
    }
    let config: Value = serde_json::from_slice(&files["tokenizer_config.json"]).unwrap();
    assert_eq!(config["tokenizer_class"], "PreTrainedTokenizerFast");
}

#[test]
fn text_is_neither_cut_nor_padded_nor_marked() {
    let (_folder, name) = saved(&words(true));
    let tokenizer = Tokenizer::open(&name).unwrap();
    assert_eq!(tokenizer.encode("to be or not to be far away").unwrap(), [0, 1, 2, 3, 0, 1, 70_000, 5]);
    assert_eq!(tokenizer.vocab_size(), 70_001, "a model needs an embedding up to the last id");
    assert_eq!(tokenizer.decode(&[0, 1, 4, 70_000]).unwrap(), "to be [CLS] far");
}

#[test]
fn a_users_files_are_passed_through_to_the_byte() {
    let (folder, name) = saved(&words(true));
    let odd = b"{ \"tokenizer_class\" :  \"Mine\"}\n\n".to_vec();
    fs::write(folder.path().join("tokenizer_config.json"), &odd).unwrap();
    fs::write(folder.path().join("model.safetensors"), b"not for us").unwrap();
    let expected = [
        ("tokenizer.json".to_owned(), words(true).to_string().into_bytes()),
        ("tokenizer_config.json".to_owned(), odd),
    ];
    assert_eq!(Tokenizer::open(&name).unwrap().companion_files(), expected);
}

#[test]
fn cutting_large_text_into_pieces_changes_no_token() {
    let (folder, name) = saved(&gpt2_like());
    let tokenizer = Tokenizer::open(&name).unwrap();
    let text: String = (0..40_000).map(|n| format!("the {n}\n\n  the\n\n\nthe  \u{e9}\n")).collect();
    let file: PathBuf = folder.path().join("text");
    fs::write(&file, &text).unwrap();
    let corpus = Corpus::from_paths(&[file.display().to_string()]).unwrap();
    let stream = TokenStream::from_text(&corpus, &tokenizer).unwrap();

    let whole = tokenizer.encode(&text).unwrap();
    assert!(text.len() > 3 * (256 << 10) && whole.len() < text.len(), "several pieces, and merged tokens");
    let mut pieces = vec![0; stream.len() as usize];
    stream.read(0, &mut pieces).unwrap();
    assert!(pieces == whole);
}

#[test]
fn tokens_of_a_large_vocabulary_are_kept_whole() {
    let (folder, name) = saved(&words(true));
    fs::write(folder.path().join("text"), "to far be").unwrap();
    let corpus = Corpus::from_paths(&[folder.path().join("text").display().to_string()]).unwrap();
    let stream = TokenStream::from_text(&corpus, &Tokenizer::open(&name).unwrap()).unwrap();
    let mut tokens = [0; 3];
    stream.read(0, &mut tokens).unwrap();
    assert_eq!(tokens, [0, 70_000, 1]);
}

#[test]
fn what_is_no_tokenizer_is_refused_by_name() {
    let empty = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": {}, "unk_token": "[UNK]" }
    });
    for (content, part) in [
        (json!([]), "expected a tokenizer in the format of Hugging Face"),
        (json!({ "model": { "type": "Unheard" } }), "set data.tokenizer to \"bytes\""),
        (empty, "no token in it"),
    ] {
        let (_folder, name) = saved(&content);
        let error = Tokenizer::open(&name).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains(&name), "expected `{part}` in: {error}");
    }
    let error = Tokenizer::open("no/such/tokenizer.json").unwrap_err().to_string();
    assert!(error.contains("no/such/tokenizer.json: could not read the tokenizer"), "{error}");

    let (_folder, name) = saved(&words(false));
    let error = Tokenizer::open(&name).unwrap().encode("to unheard").unwrap_err();
    assert!(matches!(error, DataError::Tokenize { .. }), "{error}");
}

/// Dropout leaves merges out at random: every rank would see other tokens.
#[test]
fn merges_are_never_dropped() {
    let (_folder, file) = saved(&json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {
            "type": "BPE", "dropout": 0.9, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": { "a": 0, "b": 1, "ab": 2, "abab": 3 }, "merges": ["a b", "ab ab"]
        }
    }));
    let tokenizer = Tokenizer::open(&file).unwrap();
    for _ in 0..20 {
        assert_eq!(tokenizer.encode("abababab").unwrap(), [3, 3]);
    }
    let (name, exported) = tokenizer.companion_files().remove(0);
    assert_eq!((name.as_str(), exported), ("tokenizer.json", fs::read(&file).unwrap()), "passed on as it is");
}
