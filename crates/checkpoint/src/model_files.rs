//! The names that a Hugging Face model folder holds: what is read, what is written, and what may be replaced.

/// The weights of a model that fits one file.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";

/// The index of a model that is split over several files.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The small files that may accompany the weights. A folder with any other file in it is never replaced, and
/// so [`FolderWriter::add_file`](crate::FolderWriter::add_file) writes no other.
pub const COMPANION_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
];

/// The name of file `number` (from 1) of `count`.
pub(crate) fn shard_name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// Whether a name is one that weights are stored under: the single file, or a file of a split model.
pub(crate) fn is_weights_file(name: &str) -> bool {
    let split = || {
        let (number, count) =
            name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
        let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        (digits(number) && digits(count)).then_some(())
    };
    name == SINGLE_FILE || split().is_some()
}

/// Whether a name belongs in a model folder.
pub(crate) fn is_model_file(name: &str) -> bool {
    is_weights_file(name) || name == INDEX_FILE || COMPANION_FILES.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_names_of_a_model_folder_are_known() {
        for name in ["model.safetensors", "model-00001-of-00002.safetensors", INDEX_FILE, "config.json"] {
            assert!(is_model_file(name), "{name}");
        }
        let shard = shard_name(7, 123_456);
        assert_eq!(shard, "model-00007-of-123456.safetensors");
        assert!(is_weights_file(&shard));
        for name in [
            "",
            "notes.txt",
            "model.bin",
            "model-1-of-2.safetensors",
            "model-0000a-of-00002.safetensors",
            "my-model.safetensors",
            "model-00001-of-00002.safetensors.bak",
        ] {
            assert!(!is_model_file(name), "{name}");
        }
    }
}
