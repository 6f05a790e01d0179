//! Folders of weights: what is read by whom, what is written, and what is wrong with a folder.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::Device;
use common::{DEADLINE, FIXTURES, config, data, on_one_thread, optimizer};
use safetensors::tensor::{Dtype, TensorView};
use shardwise_burn::{ParamSource, ShardedModel};
use shardwise_checkpoint::{
    DEFAULT_MAX_FILE_BYTES, FloatType, FolderWriter, SafetensorsFolder, StoredLayout, TensorSpec,
};
use shardwise_comm::threads;
use shardwise_models::{ModelConfig, ModelError, WeightsFolder, export_plan, write_parameter};

/// Shapes and bits of all tensors in a folder, by name.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u32>)>;

fn tensors(folder: &Path) -> Tensors {
    let folder = SafetensorsFolder::open(folder).expect("a folder");
    let read = |name: &str| {
        let info = folder.info(name).expect("a tensor");
        let mut values = vec![0.0; info.numel()];
        folder.read_range(name, 0..info.numel(), StoredLayout::AsIs, &mut values).expect("values");
        (name.to_string(), (info.shape.clone(), values.into_iter().map(f32::to_bits).collect()))
    };
    folder.names().map(read).collect()
}

/// Writes a folder that holds `tensors`.
fn write(folder: &Path, tensors: &Tensors) {
    let spec = |(name, (shape, _)): (&String, &(Vec<usize>, _))| TensorSpec {
        name: name.clone(),
        shape: shape.clone(),
        dtype: FloatType::F32,
    };
    let plan = tensors.iter().map(spec).collect();
    let mut writer = FolderWriter::create(folder, plan, DEFAULT_MAX_FILE_BYTES).expect("a writer");
    for (name, (_, bits)) in tensors {
        let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        writer.write(name, &values, StoredLayout::AsIs).expect("written");
    }
    writer.finish().expect("in place");
}

/// Shards the model in `from` over `ranks` ranks and lets rank 0 export it to `to`. Returns the bytes each rank has read.
fn load_and_export(from: &Path, to: &Path, ranks: usize, max_file_bytes: u64) -> Vec<u64> {
    let (config, _) = config(from);
    let run = |group: shardwise_comm::ProcessGroup| {
        let weights = WeightsFolder::open(from, &config).expect("weights");
        let module = config.init(&Device::flex().autodiff()).expect("a valid configuration");
        let is_writer = group.rank() == 0;
        let mut model = ShardedModel::new(group, module, optimizer("adamw").0, &weights).expect("sharded");
        let mut writer = is_writer.then(|| {
            let plan = export_plan(&config).expect("a plan");
            FolderWriter::create(to, plan, max_file_bytes).expect("a writer")
        });
        let see = |path: &str, _: &[usize], values: &[f32]| {
            if let Some(writer) = &mut writer {
                write_parameter(writer, &config, path, values).expect("written");
            }
        };
        model.export(see).expect("exported");
        if let Some(mut writer) = writer {
            writer.add_file("config.json", config.to_json().as_bytes()).expect("written");
            writer.finish().expect("in place");
        }
        weights.bytes_read()
    };
    threads::run(ranks, DEADLINE, |group| on_one_thread(|| run(group))).expect("a world")
}

#[test]
fn a_model_comes_back_byte_for_byte() {
    for fixture in FIXTURES {
        for ranks in [1, 3] {
            let parent = tempfile::tempdir().expect("a folder");
            let copy = parent.path().join("copy");
            load_and_export(&data(fixture), &copy, ranks, DEFAULT_MAX_FILE_BYTES);
            let file = |folder: &Path| std::fs::read(folder.join("model.safetensors")).expect("weights");
            assert!(file(&copy) == file(&data(fixture)), "{fixture} on {ranks} ranks");
            assert_eq!(config(&copy), config(&data(fixture)));
        }
    }
}

#[test]
fn a_model_comes_back_through_an_index() {
    for fixture in FIXTURES {
        let parent = tempfile::tempdir().expect("a folder");
        let (split, again) = (parent.path().join("split"), parent.path().join("again"));
        load_and_export(&data(fixture), &split, 2, 200_000);
        assert!(split.join("model.safetensors.index.json").exists());
        assert!(tensors(&split) == tensors(&data(fixture)), "{fixture}");
        load_and_export(&split, &again, 2, DEFAULT_MAX_FILE_BYTES);
        assert!(tensors(&again) == tensors(&data(fixture)), "{fixture}");
    }
}

/// Names are those of the model with its head, whatever they were; values are f32, whatever they were.
#[test]
fn variants_are_exported_in_the_usual_form() {
    for name in ["gpt2-untied-inner", "gpt2-without-prefix", "llama-tied-one-key-head", "llama-bf16-old-rope"]
    {
        let folder = data("variants").join(name);
        let parent = tempfile::tempdir().expect("a folder");
        let copy = parent.path().join("copy");
        load_and_export(&folder, &copy, 2, DEFAULT_MAX_FILE_BYTES);
        let prefixed = |name: String| {
            if name.starts_with("h.") || name.starts_with('w') || name.starts_with("ln_f") {
                format!("transformer.{name}")
            } else {
                name
            }
        };
        let want: Tensors =
            tensors(&folder).into_iter().map(|(name, tensor)| (prefixed(name), tensor)).collect();
        assert!(tensors(&copy) == want, "{name}");
        // The configuration has the usual form too, and describes the same model.
        let ((copied, _), (original, _)) = (config(&copy), config(&folder));
        assert_eq!(copied.parameters().expect("valid"), original.parameters().expect("valid"));
    }
}

#[test]
fn each_rank_reads_its_own_slices() {
    for fixture in FIXTURES {
        let parent = tempfile::tempdir().expect("a folder");
        let numel: usize =
            config(&data(fixture)).0.parameters().expect("valid").iter().map(|p| p.numel()).sum();
        let read = load_and_export(&data(fixture), &parent.path().join("copy"), 4, DEFAULT_MAX_FILE_BYTES);
        for bytes in &read {
            // Of matrices that are turned over up to twice a slice is read.
            let factor = if fixture == "llama-tiny" { 2 } else { 1 };
            let shard = 4 * numel.div_ceil(4) + 64;
            assert!(*bytes <= (factor * shard) as u64, "{fixture}: {bytes} of {numel} elements");
        }
    }
}

#[test]
fn every_parameter_is_one_tensor() {
    for fixture in FIXTURES {
        let (config, _) = config(&data(fixture));
        let parameters = config.parameters().expect("valid");
        let names: std::collections::BTreeSet<_> = parameters.iter().map(|p| p.tensor.clone()).collect();
        assert!(names.iter().eq(tensors(&data(fixture)).keys()), "{fixture}");
        assert_eq!(names.len(), parameters.len());
        let unknown = config.hf_name("blocks.0.attention.rotation").expect_err("refused").to_string();
        assert!(
            unknown.contains("`blocks.0.attention.rotation`") && unknown.contains(config.family()),
            "{unknown}"
        );
        for path in ["", "blocks", "blocks.x.mlp.up.weight", "blocks.0", "token_embedding"] {
            assert!(config.hf_name(path).is_err(), "{path}");
        }
    }
    let (gpt2, _) = config(&data("gpt2-tiny"));
    let qkv = gpt2.hf_name("blocks.2.attention.qkv.weight").expect("known");
    assert_eq!(qkv, ("transformer.h.2.attn.c_attn.weight".to_string(), StoredLayout::AsIs));
    let (llama, _) = config(&data("llama-tiny"));
    let query = llama.hf_name("blocks.0.attention.query.weight").expect("known");
    assert_eq!(query, ("model.layers.0.self_attn.q_proj.weight".to_string(), StoredLayout::Transposed));
}

/// Opens a fixture's weights after a change to its tensors and its configuration.
fn open_changed(
    fixture: &str,
    change: impl FnOnce(&mut Tensors, &mut ModelConfig),
) -> Result<WeightsFolder, ModelError> {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("changed");
    let (mut config, _) = config(&data(fixture));
    let mut tensors = tensors(&data(fixture));
    change(&mut tensors, &mut config);
    write(&folder, &tensors);
    WeightsFolder::open(&folder, &config)
}

#[test]
fn constants_and_strange_tensors_are_not_parameters() {
    let weights = open_changed("gpt2-tiny", |tensors, _| {
        for name in ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias", "b.extra", "a.extra"] {
            tensors.insert(name.to_string(), (vec![1], vec![0]));
        }
    });
    assert_eq!(weights.expect("opened").unused(), ["a.extra", "b.extra"]);
    let weights = open_changed("llama-tiny", |tensors, _| {
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_string(), (vec![8], vec![0; 8]));
    });
    assert!(weights.expect("opened").unused().is_empty());
    // A model with fewer layers than the weights.
    let weights = open_changed("gpt2-tiny", |_, config| {
        if let ModelConfig::Gpt2(config) = config {
            config.n_layer = 2;
        }
    });
    let error = weights.expect_err("refused").to_string();
    assert!(
        error.contains("2 layers") && error.contains("`transformer.h.2.attn.c_attn.bias` (12 such"),
        "{error}"
    );
}

/// What changes the mathematics is refused, also where the parameters that are there would suffice.
#[test]
fn tensors_that_the_model_should_compute_with_are_refused() {
    for (fixture, tensor) in [
        ("llama-tiny", "model.layers.0.self_attn.q_proj.bias"),
        ("llama-tiny", "model.layers.1.self_attn.q_norm.weight"),
        ("llama-tiny", "layers.7.mlp.up_proj.weight"),
        ("llama-tiny", "model.norm.bias"),
        ("llama-tiny", "lm_head.bias"),
    ] {
        let weights = open_changed(fixture, |tensors, _| {
            tensors.insert(tensor.to_string(), (vec![1], vec![0]));
        });
        let error = weights.expect_err(tensor).to_string();
        assert!(error.contains(&format!("found `{tensor}` (1 such")), "{error}");
    }
    let weights = open_changed("llama-tiny", |tensors, _| {
        for name in ["score.weight", "score.bias", "c", "d", "e", "f"] {
            tensors.insert(name.to_string(), (vec![1], vec![0]));
        }
    });
    let warning = weights.expect("opened").warning().expect("a warning");
    assert!(warning.ends_with("`c`, `d`, `e`, `f`, `score.bias` and 1 more"), "{warning}");
}

#[test]
fn a_tied_models_weights_may_hold_its_head_if_it_is_the_embedding() {
    let head = "lm_head.weight".to_string();
    let embedding = "transformer.wte.weight";
    let same = open_changed("gpt2-tiny", |tensors, _| {
        tensors.insert(head.clone(), tensors[embedding].clone());
    });
    assert!(same.expect("opened").unused().is_empty());
    let other = open_changed("gpt2-tiny", |tensors, _| {
        let (shape, mut bits) = tensors[embedding].clone();
        bits[17] ^= 1;
        tensors.insert(head.clone(), (shape, bits));
    });
    let error = other.expect_err("refused").to_string();
    assert!(error.contains("`lm_head.weight` to equal `transformer.wte.weight`"), "{error}");
    assert!(error.contains("set `tie_word_embeddings` to false"), "{error}");
    // Untied, both are parameters.
    let untied = open_changed("gpt2-tiny", |tensors, config| {
        tensors.insert(head.clone(), tensors[embedding].clone());
        if let ModelConfig::Gpt2(config) = config {
            config.tie_word_embeddings = false;
        }
    });
    assert!(untied.expect("opened").unused().is_empty());
}

#[test]
fn what_is_missing_or_of_another_shape_is_named() {
    let missing = open_changed("gpt2-tiny", |tensors, _| {
        tensors.remove("transformer.h.1.ln_2.bias");
    });
    let error = missing.expect_err("refused").to_string();
    assert!(error.contains("expected tensor `transformer.h.1.ln_2.bias` of shape [64]"), "{error}");
    assert!(
        error.contains("`blocks.1.mlp_norm.beta`") && error.contains("with `transformer.` or without"),
        "{error}"
    );

    let headless = open_changed("llama-tiny", |tensors, _| {
        tensors.remove("lm_head.weight");
    });
    let error = headless.expect_err("refused").to_string();
    assert!(error.contains("`lm_head.weight` of shape [512, 64]"), "{error}");
    assert!(error.contains("set `tie_word_embeddings` to true"), "{error}");

    // Shapes are told as they are stored: [out, in].
    let narrow = open_changed("llama-tiny", |_, config| {
        if let ModelConfig::Llama(config) = config {
            config.intermediate_size = Some(128);
        }
    });
    let error = narrow.expect_err("refused").to_string();
    let expected = "`model.layers.0.mlp.gate_proj.weight` of shape [128, 64] for the parameter `blocks.0.mlp.gate.weight`, \
                    found [160, 64]";
    assert!(error.contains(expected), "{error}");

    let none = WeightsFolder::open(data("variants"), &config(&data("gpt2-tiny")).0).expect_err("refused");
    assert!(none.to_string().contains("expected `model.safetensors`"), "{none}");
}

#[test]
fn a_type_that_is_not_read_is_named() {
    let parent = tempfile::tempdir().expect("a folder");
    let mut all = tensors(&data("gpt2-tiny"));
    let (shape, bits) = all.remove("transformer.ln_f.bias").expect("there");
    let bytes: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = all
        .into_iter()
        .map(|(name, (shape, bits))| {
            (name, (Dtype::F32, shape, bits.iter().flat_map(|b| b.to_le_bytes()).collect()))
        })
        .chain([("transformer.ln_f.bias".to_string(), (Dtype::F64, shape, vec![0; 8 * bits.len()]))])
        .collect();
    let views = bytes.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a view"))
    });
    safetensors::serialize_to_file(views, None, &parent.path().join("model.safetensors")).expect("written");
    let error =
        WeightsFolder::open(parent.path(), &config(&data("gpt2-tiny")).0).expect_err("refused").to_string();
    assert!(error.contains("`transformer.ln_f.bias` as F32, F16 or BF16, found F64"), "{error}");
}

#[test]
fn a_source_gives_only_what_it_was_opened_for() {
    let folder = data("gpt2-tiny");
    let weights = WeightsFolder::open(&folder, &config(&folder).0).expect("weights");
    let mut out = [0.0; 3];
    assert_eq!(weights.fill("final_norm.gamma", &[64], 5..8, &mut out), Ok(true));
    let ln_f = &tensors(&folder)["transformer.ln_f.weight"].1;
    assert_eq!(out.map(f32::to_bits), ln_f[5..8]);
    let shape = weights.fill("final_norm.gamma", &[65], 5..8, &mut out).expect_err("refused");
    assert!(shape.contains("[65]") && shape.contains("[64]"), "{shape}");
    let path = weights.fill("final_norm.delta", &[64], 5..8, &mut out).expect_err("refused");
    assert!(path.contains("no such parameter"), "{path}");
}
