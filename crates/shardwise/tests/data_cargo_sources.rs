//! The default corpus: the same sources for every process, a broad mix, and a clear answer when there are none.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use shardwise::data::{CargoSources, Corpus, DataError, TokenStream, Tokenizer};
use tempfile::TempDir;

/// A machine with a cargo home, a project folder, and whatever files are put there.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(machine.project()).unwrap();
        machine
    }

    fn project(&self) -> PathBuf {
        self.0.path().join("project/crates/deep")
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> &Self {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        self
    }

    /// Puts a file into a fetched package, such as `rand-0.9.1`.
    fn fetch(&self, package: &str, file: &str, bytes: impl AsRef<[u8]>) -> &Self {
        self.put(&format!("cargo/registry/src/registry-0123/{package}/{file}"), bytes)
    }

    /// Writes the project's lock file, with a workspace member and these packages of the registry.
    fn lock(&self, packages: &[(&str, &str)]) -> &Self {
        let mut lock = "version = 4\n\n[[package]]\nname = \"own\"\nversion = \"0.1.0\"\n".to_owned();
        for (name, version) in packages {
            let source = "registry+https://github.com/rust-lang/crates.io-index";
            lock += &format!(
                "\n[[package]]\nname = \"{name}\"\nversion = \"{version}\"\nsource = \"{source}\"\n"
            );
        }
        self.put("project/Cargo.lock", lock)
    }

    fn sources(&self, max_bytes: u64) -> CargoSources {
        CargoSources { cargo_home: self.0.path().join("cargo"), directory: self.project(), max_bytes }
    }

    fn corpus(&self) -> Corpus {
        self.sources(CargoSources::DEFAULT_MAX_BYTES).corpus().unwrap()
    }

    /// The corpus as `package/file`, sorted.
    fn taken(&self) -> Vec<String> {
        let names = self.corpus().files().iter().map(|file| short(file)).collect::<BTreeSet<_>>();
        names.into_iter().collect()
    }
}

/// A file's path after its registry's or vendor folder.
fn short(file: &Path) -> String {
    let text = file.display().to_string();
    let after = |marker: &str| text.split_once(marker).map(|(_, rest)| rest.to_owned());
    after("registry-0123/").or_else(|| after("vendor/")).unwrap_or(text)
}

#[test]
fn the_packages_are_those_of_the_nearest_lock_file_in_their_newest_version() {
    let machine = Machine::new();
    for package in
        ["rand-0.8.5", "rand-0.10.0", "sha-1-0.10.1", "sha-1-0.10.1-rc.9", "log-0.4.1", "own-0.1.0"]
    {
        machine.fetch(package, "src/lib.rs", package);
    }
    machine.fetch("index-cache", "lib.rs", "no version in its name");
    let everything = ["log-0.4.1/src/lib.rs", "own-0.1.0/src/lib.rs"];
    assert_eq!(
        machine.taken(),
        [&everything[..], &["rand-0.10.0/src/lib.rs", "sha-1-0.10.1/src/lib.rs"]].concat(),
        "without a lock file, every package"
    );

    machine.lock(&[("rand", "0.8.5"), ("rand", "0.10.0"), ("sha-1", "0.10.1-rc.9"), ("absent", "1.0.0")]);
    assert_eq!(machine.taken(), ["rand-0.10.0/src/lib.rs", "sha-1-0.10.1-rc.9/src/lib.rs"]);
    machine.lock(&[("rand", "0.8.5")]);
    assert_eq!(machine.taken(), ["rand-0.8.5/src/lib.rs"], "the newest of those in the lock file");
    machine.lock(&[("absent", "1.0.0")]);
    assert_eq!(machine.taken().len(), 4, "a lock file that names nothing here is no restriction");
}

#[test]
fn newer_is_what_cargo_says_is_newer() {
    for (older, newer) in [
        ("1.9.0", "1.10.0"),
        ("0.9.9", "1.0.0-alpha"),
        ("1.0.0-alpha.2", "1.0.0-alpha.10"),
        ("1.0.0-9", "1.0.0-alpha"),
        ("1.0.0-rc.1", "1.0.0"),
        ("1.0.0+build.9", "1.0.1+build.1"),
    ] {
        let machine = Machine::new();
        machine.fetch(&format!("p-{older}"), "a.rs", "old").fetch(&format!("p-{newer}"), "a.rs", "new");
        assert_eq!(machine.taken(), [format!("p-{newer}/a.rs")], "{older} and {newer}");
    }
}

#[test]
fn only_rust_text_that_people_write_is_taken() {
    let machine = Machine::new();
    let limit = 256 << 10;
    machine
        .fetch("p-1.0.0", "src/lib.rs", "a")
        .fetch("p-1.0.0", "tests/deep/er/t.rs", "b")
        .fetch("p-1.0.0", "README.md", "text")
        .fetch("p-1.0.0", "src/empty.rs", "")
        .fetch("p-1.0.0", "src/latin1.rs", b"caf\xe9")
        .fetch("p-1.0.0", ".github/hidden.rs", "c")
        .fetch("p-1.0.0", "src/generated.rs", vec![b'x'; limit + 1]);
    assert_eq!(machine.taken(), ["p-1.0.0/src/lib.rs", "p-1.0.0/tests/deep/er/t.rs"]);
}

#[test]
fn a_corpus_is_a_broad_mix_cut_at_its_limit_and_the_same_everywhere() {
    let machine = Machine::new();
    let elsewhere = Machine::new();
    for package in 0..100 {
        for file in 0..4 {
            let text = format!("{package} {file} {}", "x".repeat(1000));
            machine.fetch(&format!("p{package}-1.0.0"), &format!("src/{file}.rs"), &text);
            elsewhere.fetch(&format!("p{package}-1.0.1"), &format!("src/{file}.rs"), &text);
        }
    }
    let corpus = |machine: &Machine, bytes| machine.sources(bytes).corpus().unwrap();
    let text = |machine: &Machine, bytes| {
        let mut text = String::new();
        let append = |piece: &str| {
            text.push_str(piece);
            Ok(())
        };
        corpus(machine, bytes).for_each_piece(append).unwrap();
        text
    };
    let limit = 200_000;
    let small = text(&machine, limit);
    assert!(small.len() as u64 <= limit && small.len() as u64 > limit - 2_000, "{} bytes", small.len());
    assert_eq!(small, text(&machine, limit), "the same each time");
    assert_eq!(small, text(&elsewhere, limit), "the same in another place and after an update of versions");

    let packages: BTreeSet<String> = corpus(&machine, limit)
        .files()
        .iter()
        .map(|file| short(file).split('/').next().unwrap().to_owned())
        .collect();
    assert!(packages.len() > 70, "files of only {} packages", packages.len());
}

#[test]
fn no_package_crowds_out_the_others() {
    let machine = Machine::new();
    for file in 0..500 {
        machine.fetch("bindings-1.0.0", &format!("src/{file}.rs"), "x".repeat(998));
        machine.fetch(&format!("p{file}-1.0.0"), "src/lib.rs", "y".repeat(998));
    }
    let corpus = machine.sources(640_000).corpus().unwrap();
    let of_bindings = corpus.files().iter().filter(|file| short(file).starts_with("bindings")).count();
    assert_eq!((of_bindings, corpus.files().len()), (10, 510), "a 64th of 640 thousand bytes");
}

#[test]
fn vendored_sources_are_found_through_cargo() {
    let machine = Machine::new();
    machine
        .put("project/Cargo.toml", "[workspace]\nmembers = ['crates/own']\nresolver = '3'\n")
        .put(
            "project/crates/own/Cargo.toml",
            "[package]\nname = 'own'\nversion = '0.1.0'\nedition = '2024'\n[dependencies]\nvendored = '1'\n",
        )
        .put("project/crates/own/src/lib.rs", "")
        .put(
            "project/.cargo/config.toml",
            "[source.crates-io]\nreplace-with = 'here'\n[source.here]\ndirectory = 'vendor'\n",
        )
        .put(
            "project/vendor/vendored/Cargo.toml",
            "[package]\nname = 'vendored'\nversion = '1.2.0'\nedition = '2024'\n",
        )
        .put("project/vendor/vendored/src/lib.rs", "//! Vendored.\n")
        .put("project/vendor/vendored/.cargo-checksum.json", r#"{"files":{}}"#);
    machine.fetch("unrelated-1.0.0", "src/lib.rs", "of another project");
    let lock = "version = 4\n\n[[package]]\nname = \"own\"\nversion = \"0.1.0\"\ndependencies = [\n \
                \"vendored\",\n]\n\n[[package]]\nname = \"vendored\"\nversion = \"1.2.0\"\nsource = \
                \"registry+https://github.com/rust-lang/crates.io-index\"\n";
    machine.put("project/Cargo.lock", lock);
    assert_eq!(machine.taken(), ["vendored/src/lib.rs"]);
}

#[test]
fn nothing_found_says_where_it_was_looked_for() {
    let machine = Machine::new();
    let error = machine.sources(1 << 20).corpus().unwrap_err();
    assert!(matches!(error, DataError::NoSources { .. }));
    let registry = machine.0.path().join("cargo/registry/src").display().to_string();
    for part in ["0 packages in", &registry, "no Cargo.lock in or above", "set data.path"] {
        assert!(error.to_string().contains(part), "expected `{part}` in: {error}");
    }

    machine.lock(&[("absent", "1.0.0")]).put("project/Cargo.toml", "not a manifest");
    let error = machine.sources(1 << 20).corpus().unwrap_err().to_string();
    for part in ["none of the 1 packages of", "Cargo.lock", "`cargo metadata --offline --locked"] {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }

    machine.put("project/Cargo.lock", "[[package");
    let error = machine.sources(1 << 20).corpus().unwrap_err().to_string();
    assert!(error.contains("Cargo.lock") && error.contains("could not parse it"), "{error}");
}

#[test]
fn this_build_left_a_corpus_behind() {
    let streams = [(); 2]
        .map(|()| TokenStream::from_text(&Corpus::default_text().unwrap(), &Tokenizer::bytes()).unwrap());
    assert!(streams[0].len() > 1 << 20 && streams[0].len() <= CargoSources::DEFAULT_MAX_BYTES);
    assert_eq!(streams[0].fingerprint().unwrap(), streams[1].fingerprint().unwrap());
}
