//! The one error type of this crate: what was expected where, what was found, and what to do.

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why weights could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("{}: could not {action}: {source}; {}", path.display(), remedy(source))]
    Io {
        /// The file or folder concerned.
        path: PathBuf,
        /// What was attempted.
        action: String,
        /// What the system answered.
        source: io::Error,
    },

    /// A folder without safetensors weights.
    #[error(
        "{}: expected `model.safetensors` or `model.safetensors.index.json`, found neither; name the folder \
         that holds them, or save the model again with `safe_serialization=True`",
        folder.display()
    )]
    NoWeights {
        /// The folder that was opened.
        folder: PathBuf,
    },

    /// A safetensors file whose header is malformed or disagrees with the file.
    #[error(
        "{}: expected {expected}, found {found}; the file is damaged or incomplete: fetch or export it \
         again",
        file.display()
    )]
    Header {
        /// The safetensors file.
        file: PathBuf,
        /// What the format demands.
        expected: String,
        /// What the file holds.
        found: String,
    },

    /// An index that is not what `model.safetensors.index.json` should be.
    #[error("{}: expected {expected}, found {found}; fetch or export the index again", file.display())]
    Index {
        /// The index.
        file: PathBuf,
        /// What was expected of it.
        expected: String,
        /// What it holds.
        found: String,
    },

    /// An index that names a file outside its folder.
    #[error(
        "{}: expected tensor `{tensor}` in a file beside the index, found the name `{shard}`; do not trust \
         this folder, or edit the index to plain file names",
        index.display()
    )]
    ShardOutsideFolder {
        /// The index.
        index: PathBuf,
        /// The tensor said to be in that file.
        tensor: String,
        /// The file's name as the index gives it.
        shard: String,
    },

    /// An index that names a file which is not there.
    #[error(
        "{}: expected the file `{shard}` beside the index, for {tensors} tensors, found none; fetch it too",
        index.display()
    )]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The file that is missing.
        shard: String,
        /// How many tensors it should hold.
        tensors: usize,
    },

    /// A tensor that is not in the file where the index puts it.
    #[error(
        "{}: expected tensor `{tensor}`, as the index says, found no such tensor; index and file are of \
         different exports: fetch both again",
        shard.display()
    )]
    NotInShard {
        /// The file that should hold it.
        shard: PathBuf,
        /// The missing tensor.
        tensor: String,
    },

    /// One tensor in two files.
    #[error(
        "tensor `{tensor}`: expected it in one file, found it in {} and {}; remove the stale file or export \
         again",
        first.display(), second.display()
    )]
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// A file that holds it.
        first: PathBuf,
        /// Another file that holds it.
        second: PathBuf,
    },

    /// A name that the folder does not hold.
    #[error(
        "{}: expected a tensor named `{tensor}`, found {count} others such as `{example}`; check the prefix \
         and that this is the right model",
        folder.display()
    )]
    UnknownTensor {
        /// The folder.
        folder: PathBuf,
        /// The name asked for.
        tensor: String,
        /// How many tensors the folder holds.
        count: usize,
        /// One that resembles the name, or else the first.
        example: String,
    },

    /// A tensor whose elements are not f32, f16 or bf16.
    #[error(
        "{}: expected tensor `{tensor}` as F32, F16 or BF16, found {dtype}; convert it before training, or \
         leave it out",
        file.display()
    )]
    UnsupportedDtype {
        /// The file that holds it.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: safetensors::Dtype,
    },

    /// A range that ends past its tensor, or before its own start.
    #[error(
        "tensor `{tensor}`: expected a range within its {elements} elements, found {start}..{end}; the \
         model's shape differs from the stored one {shape:?}: check the configuration"
    )]
    Range {
        /// The tensor.
        tensor: String,
        /// The range's first element.
        start: usize,
        /// One past the range's last element.
        end: usize,
        /// How many elements the tensor has.
        elements: usize,
        /// Its shape.
        shape: Vec<usize>,
    },

    /// A slice whose length is not that of the range or tensor.
    #[error(
        "tensor `{tensor}`: expected a slice of {expected} elements, found one of {found}; pass one of that \
         length"
    )]
    SliceLength {
        /// The tensor.
        tensor: String,
        /// The length demanded.
        expected: usize,
        /// The length given.
        found: usize,
    },

    /// A transposition of something other than a matrix.
    #[error(
        "tensor `{tensor}`: expected 2 dimensions to transpose, found shape {shape:?}; use \
         `StoredLayout::AsIs`"
    )]
    NotAMatrix {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },

    /// A list of tensors that cannot be written.
    #[error("plan of a model folder: expected {expected}, found {found}; correct the list of tensors")]
    Plan {
        /// What a plan needs.
        expected: String,
        /// What this one has.
        found: String,
    },

    /// A tensor given to a writer whose plan lacks it.
    #[error(
        "tensor `{tensor}`: expected one of the plan's {planned} tensors, found a name outside it; add it \
         to the plan"
    )]
    Unplanned {
        /// The tensor.
        tensor: String,
        /// How many tensors the plan has.
        planned: usize,
    },

    /// A tensor given twice.
    #[error("tensor `{tensor}`: expected once, found a second time; write each tensor of the plan once")]
    WrittenTwice {
        /// The tensor.
        tensor: String,
    },

    /// A writer finished before it had every tensor.
    #[error(
        "{}: expected all tensors of the plan, found {missing} not written, `{example}` among them; write \
         them before finishing; nothing was put in place",
        folder.display()
    )]
    NotWritten {
        /// The folder to be.
        folder: PathBuf,
        /// How many are missing.
        missing: usize,
        /// One of them.
        example: String,
    },

    /// A finite value that would become infinite.
    #[error(
        "tensor `{tensor}`: expected values that fit {dtype}, found {value:e} at element {element}; write \
         it as F32"
    )]
    Overflow {
        /// The tensor.
        tensor: String,
        /// The type it should be stored in.
        dtype: crate::FloatType,
        /// The value.
        value: f32,
        /// Its place in the slice.
        element: usize,
    },

    /// A small file that a model folder does not hold, or holds already.
    #[error(
        "file `{name}`: expected one of {allowed:?}, each once, found {found}; write other files elsewhere"
    )]
    Companion {
        /// The name given.
        name: String,
        /// The names allowed.
        allowed: &'static [&'static str],
        /// What is wrong with this one.
        found: &'static str,
    },

    /// A target that is not a model folder, and so is not replaced.
    #[error(
        "{}: expected no such path, an empty folder, or a model folder to replace, found {found}; choose \
         another folder or move that away",
        folder.display()
    )]
    NotAModelFolder {
        /// The target.
        folder: PathBuf,
        /// What is there.
        found: String,
    },

    /// A file system that cannot swap two folders in one step.
    #[error(
        "{}: expected a file system that can exchange two folders (renameat2), found {source}; write to a \
         new name, or remove the old folder first",
        folder.display()
    )]
    NoExchange {
        /// The target.
        folder: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
}

impl Error {
    /// The error of an attempt on `path`, from what the system answered.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_path_buf(), action: action.to_owned(), source }
    }
}

/// What a user can do about an answer of the system.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "check permissions and who owns it"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free space, raise the limit, or choose another disk"
        }
        io::ErrorKind::TimedOut => "another process holds it: end that one, or try again later",
        io::ErrorKind::UnexpectedEof => "the file was shortened while in use: fetch or export it again",
        _ => "check the path and the disk",
    }
}
