//! Text to token ids and back: every byte a token, or a Hugging Face `tokenizer.json`.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tokenizers::ModelWrapper;

use super::error::{DataError, Result};

/// The name of the tokenizer whose tokens are bytes.
pub const BYTES: &str = "bytes";

/// The files beside a `tokenizer.json` that `AutoTokenizer` reads with it.
const BESIDE: &[&str] = &["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// Turns text into token ids and back.
pub struct Tokenizer(Kind);

enum Kind {
    Bytes,
    Json(Box<JsonTokenizer>),
}

struct JsonTokenizer {
    file: PathBuf,
    model: tokenizers::Tokenizer,
    vocab_size: usize,
    /// Names and bytes of the file itself and those beside it.
    companions: Vec<(String, Vec<u8>)>,
}

impl Tokenizer {
    /// The tokenizer whose 256 tokens are the bytes of UTF-8.
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// The tokenizer that `name` stands for: [`BYTES`], or the path of a `tokenizer.json`. Truncation and
    /// padding that the file asks for are turned off, since they would cut the text, and so is the dropout of
    /// merges, since every rank and every run must see the same tokens.
    ///
    /// # Errors
    /// A file that cannot be read or is no tokenizer.
    pub fn open(name: &str) -> Result<Self> {
        if name == BYTES { Ok(Self::bytes()) } else { Self::open_json(Path::new(name)) }
    }

    fn open_json(file: &Path) -> Result<Self> {
        let bytes = fs::read(file).map_err(DataError::io(file, "read the tokenizer"))?;
        let refuse = |reason: tokenizers::Error| DataError::Tokenizer {
            file: file.to_path_buf(),
            reason: reason.to_string(),
        };
        let mut model = tokenizers::Tokenizer::from_bytes(&bytes).map_err(refuse)?;
        model.with_truncation(None).map_err(refuse)?;
        model.with_padding(None);
        if let ModelWrapper::BPE(bpe) = model.get_model()
            && bpe.dropout.is_some()
        {
            let mut always = bpe.clone();
            always.dropout = None;
            model.with_model(always);
        }
        // Ids may have gaps, and a model needs an embedding up to the last.
        let vocab_size = model.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        if vocab_size == 0 {
            return Err(refuse("no token in it".into()));
        }

        let mut companions = vec![("tokenizer.json".to_owned(), bytes)];
        for name in BESIDE {
            let beside = file.with_file_name(name);
            if beside.is_file() {
                let bytes = fs::read(&beside).map_err(DataError::io(&beside, "read it"))?;
                companions.push(((*name).to_owned(), bytes));
            }
        }
        Ok(Self(Kind::Json(Box::new(JsonTokenizer {
            file: file.to_path_buf(),
            model,
            vocab_size,
            companions,
        }))))
    }

    /// One more than the largest id: the least vocabulary a model needs.
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            Kind::Bytes => 256,
            Kind::Json(json) => json.vocab_size,
        }
    }

    /// The tokens of `text`, without special tokens around them. (Special tokens that stand in the text
    /// itself are recognised, as Hugging Face does.)
    ///
    /// # Errors
    /// A tokenizer that has no token for some of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.0 {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Json(json) => {
                let encoded = json.model.encode_fast(text, false);
                Ok(encoded.map_err(|error| json.failed("encode the text", error))?.get_ids().to_vec())
            }
        }
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary are left out.
    ///
    /// # Errors
    /// A tokenizer whose decoder refuses these ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.0 {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Json(json) => {
                json.model.decode(ids, false).map_err(|error| json.failed("decode the tokens", error))
            }
        }
    }

    /// Whether tokens are bytes, so that text needs no table.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self.0, Kind::Bytes)
    }

    /// The files, by name and content, with which transformers' `AutoTokenizer` loads this tokenizer from a
    /// model folder. A user's files are passed through as they are; the byte tokenizer becomes a
    /// `tokenizer.json` whose ids are the bytes.
    pub fn companion_files(&self) -> Vec<(String, Vec<u8>)> {
        match &self.0 {
            Kind::Bytes => vec![
                ("tokenizer.json".to_owned(), byte_tokenizer_json().to_string().into_bytes()),
                ("tokenizer_config.json".to_owned(), byte_tokenizer_config().to_string().into_bytes()),
            ],
            Kind::Json(json) => json.companions.clone(),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match &self.0 {
            Kind::Bytes => BYTES.to_owned(),
            Kind::Json(json) => json.file.display().to_string(),
        };
        write!(f, "Tokenizer({name}, {} tokens)", self.vocab_size())
    }
}

impl JsonTokenizer {
    fn failed(&self, action: &'static str, error: tokenizers::Error) -> DataError {
        DataError::Tokenize { file: self.file.clone(), action, reason: error.to_string() }
    }
}

/// A byte-level BPE without merges: each byte maps to one character, and that character's id is the byte.
fn byte_tokenizer_json() -> Value {
    let vocab: Map<String, Value> =
        (0..=u8::MAX).map(|byte| (byte_level_character(byte).to_string(), json!(byte))).collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": []
        }
    })
}

/// Names the class: beside a GPT-2 `config.json`, `AutoTokenizer` would add GPT-2's end-of-text token.
fn byte_tokenizer_config() -> Value {
    json!({ "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false })
}

/// GPT-2's visible character for a byte: itself where Latin-1 has a visible one, else one from U+0100 on.
fn byte_level_character(byte: u8) -> char {
    let is_visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_visible(byte) {
        return char::from(byte);
    }
    let hidden_before = (0..byte).filter(|before| !is_visible(*before)).count() as u32;
    char::from_u32(0x100 + hidden_before).unwrap_or(char::REPLACEMENT_CHARACTER)
}
