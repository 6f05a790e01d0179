//! `train`: a run from its configuration to the exported model.

use std::path::Path;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor, TensorData};
use shardwise_burn::{Init, ParamSource, ShardConfig, ShardedModel, StepError, StepOutcome};
use shardwise_checkpoint::FolderWriter;
use shardwise_comm::ProcessGroup;
use shardwise_core::{MemoryPlan, StepSchedule};
use shardwise_engine::TierTraffic;
use shardwise_models::{CausalLm, LanguageModel, ModelConfig, Sampler, WeightsFolder};
use shardwise_tier::RunFolder;

use crate::claim::claimed;
use crate::config::Config;
use crate::data::{TokenDataset, Tokenizer};
use crate::error::RunError;
use crate::generate::continue_tokens;
use crate::interrupt::PutOff;
use crate::memory::PeakProportional;
use crate::output::{harmless, print, say};
use crate::plan::{Outline, memory_plan};
use crate::report::{
    MetricsFile, Progress, RankSummary, StepMetrics, Summary, bytes, counted, median, rank_table, thousands,
    write_whole,
};
use crate::traffic::{Features, Figures};
use crate::world::{on_own_threads, run_ranks};
use crate::{bounds, dataset, export, tiers};

/// Tokens of the text that a finished run shows, and of the data that it continues.
const SAMPLE_TOKENS: usize = 200;
const PROMPT_TOKENS: usize = 16;
/// Samples among which the prompt is looked for.
const PROMPT_CANDIDATES: u64 = 64;

/// A configuration with everything that it names, looked at and found good.
struct Job {
    config: Config,
    model: ModelConfig,
    warnings: Vec<String>,
    schedule: StepSchedule,
    seq_len: usize,
    weights: Option<WeightsFolder>,
    tokenizer: Option<Tokenizer>,
}

impl Job {
    /// Looks at everything that needs no data.
    fn prepare(config: &Config) -> Result<Self, RunError> {
        let Outline { model, mut warnings, schedule, seq_len } = Outline::of(config)?;
        bounds::check_memory(&model, config.train.micro_batch, seq_len)
            .map_err(|e| RunError::user(format!("{e}; lower train.micro_batch or data.seq_len")))?;
        if config.engine().offload.is_any() {
            tiers::check(config, &tiers::layouts(config, &model)?)?;
        }
        let weights = match config.init_from()? {
            None => None,
            Some(folder) => {
                let weights = WeightsFolder::open(&folder, &model).map_err(RunError::user)?;
                warnings.extend(weights.warning());
                Some(weights)
            }
        };
        let tokenizer = dataset::tokenizer(config)?;
        Ok(Self { config: config.clone(), model, warnings, schedule, seq_len, weights, tokenizer })
    }
}

/// Trains as the configuration says; returns the exit code.
///
/// # Errors
/// When the input is wrong (nothing is written then) or the run fails.
pub fn run(config: &Config) -> Result<i32, RunError> {
    let job = Job::prepare(config)?;
    // Data that is quick to look at is looked at before anything is started, so that a mistake in it is told once.
    if std::env::var_os("RANK").is_none() && dataset::is_quick(config)? {
        dataset::open(config, &job.model, job.tokenizer.as_ref(), None)?;
    }
    // So is the folder for what rests in files.
    if std::env::var_os("RANK").is_none() {
        clear_swap(config)?;
    }
    let timeout = bounds::timeout(config.run.timeout_seconds).map_err(RunError::user)?;
    let ended = run_ranks(config.run.ranks, config.run.transport, timeout, |group| {
        on_own_threads(config.run.threads_per_rank, || {
            claimed(group, |group| Rank::new(group, &job)?.train())
        })?
    });
    if !matches!(ended, Ok(0)) && std::env::var_os("RANK").is_none() {
        // A rank may have been ended while it wrote. Where this does not succeed, the next run's does.
        for folder in [MODEL, AVERAGES] {
            let _ = FolderWriter::remove_leftovers(config.output_dir().join(folder));
        }
        let _ = remove(&config.output_dir().join(SUMMARY).with_extension("tmp"));
        let _ = clear_swap(config);
    }
    ended
}

/// Makes sure that the folder for what rests in files can be used, and removes what a dead run of this name has left there.
fn clear_swap(config: &Config) -> Result<(), RunError> {
    match config.swap_place().filter(|_| config.engine().offload.uses_files()) {
        Some(place) => Ok(RunFolder::claim(&place.path, &place.run).map(drop)?),
        None => Ok(()),
    }
}

/// Names in the output folder.
const METRICS: &str = "metrics.jsonl";
const SUMMARY: &str = "summary.json";
const MODEL: &str = "model";
const AVERAGES: &str = "model-ema";

/// Removes a file, if it is there.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// One rank of a run.
struct Rank<'a> {
    job: &'a Job,
    group: ProcessGroup,
    data: TokenDataset,
    device: Device,
    model: ShardedModel<LanguageModel>,
    plan: MemoryPlan,
    peak: PeakProportional,
    has: Features,
    /// What the tiers had moved when the step began.
    before: TierTraffic,
    /// What this rank, and all of them, have moved so far.
    moved: [Figures; 2],
}

impl<'a> Rank<'a> {
    /// Makes sure that all ranks run the same, and takes this rank's part of the model.
    fn new(group: ProcessGroup, job: &'a Job) -> Result<Self, RunError> {
        let config = &job.config;
        let data = dataset::open(config, &job.model, job.tokenizer.as_ref(), Some(&group))?;
        let mut settings = config.settings();
        settings.push(("program version".into(), env!("CARGO_PKG_VERSION").into()));
        settings.push(("model".into(), job.model.to_json()));
        settings.push(("data".into(), data.fingerprint().map_err(RunError::user)?.to_string()));
        group.check_agreement("configurations", &settings)?;
        let device = Device::flex().autodiff();
        let shard =
            ShardConfig { engine: config.engine(), recompute: config.shard.recompute, seed: config.run.seed };
        let no_weights = ();
        let source: &dyn ParamSource = match &job.weights {
            Some(weights) => weights,
            None => &no_weights,
        };
        let mut init = Init::new(shard);
        if let Some(place) = config.swap_place() {
            init = init.swap_at(place);
        }
        let model = init.shard(group.clone(), job.model.init(&device).map_err(RunError::user)?, source)?;
        let plan = memory_plan(config, &model.layouts())?;
        Ok(Self {
            job,
            group,
            data,
            device,
            plan,
            peak: PeakProportional::new(),
            has: Features::of(config),
            before: model.tier_traffic(),
            moved: Default::default(),
            model,
        })
    }

    fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    fn train(mut self) -> Result<(), RunError> {
        let output = self.job.config.output_dir();
        let mut metrics_file = self.begin(&output)?;
        let mut progress = self.is_first().then(|| Progress::new(self.job.config.run.steps));
        let mut all = Vec::new();
        let (mut sent, mut updates) = (0, 0);
        let begun = Instant::now();
        for step in 1..=self.job.config.run.steps {
            let step_begun = Instant::now();
            // Skipped steps do not count: the schedule waits for the parameters.
            let lr = self.lr(updates + 1);
            let outcome = self.step(step, lr)?;
            updates = outcome.report.updates;
            sent += outcome.report.bytes_sent;
            let metrics = self.metrics(&outcome, lr, step_begun)?;
            if let Some(file) = &mut metrics_file {
                file.add(&metrics)?;
            }
            if let Some(progress) = &mut progress {
                progress.show(&metrics);
            }
            all.push(metrics);
        }
        let seconds = begun.elapsed().as_secs_f64();
        if let Some(progress) = &progress {
            progress.finish();
        }
        self.end(&output, &all, seconds, sent)
    }

    /// Says what will run and takes the output folder.
    fn begin(&self, output: &Path) -> Result<Option<MetricsFile>, RunError> {
        // A rank that has found its part of the weights damaged ends the run before anything is written.
        self.group.barrier("model")?;
        let file = if self.is_first() {
            self.announce();
            Some(claim_output(output, self.job.config.train.ema_decay.is_some())?)
        } else {
            None
        };
        // A rank that cannot write ends the run here, before any work.
        self.group.barrier("output")?;
        Ok(file)
    }

    /// Says what will run.
    fn announce(&self) {
        let config = &self.job.config;
        let parameters: usize = self.model.layouts().iter().map(|l| l.numel()).sum();
        for warning in &self.job.warnings {
            say(&format!("warning: {warning}"));
        }
        say(&format!(
            "{}: {} with {} parameters, {} over {}",
            config.run.name,
            self.job.model.family(),
            thousands(parameters as u64),
            config.shard.strategy,
            counted(config.run.ranks as u64, "rank")
        ));
        say(&format!(
            "data: {}: {}, {} of {}{}",
            self.data.stream().origin(),
            counted(self.data.stream().len(), "token"),
            counted(self.data.num_windows(), "sample"),
            self.job.seq_len,
            match self.data.stream().held_bytes() {
                0 => String::new(),
                held => format!(", held once for all ranks in {}", bytes(held)),
            }
        ));
        say(&format!(
            "each rank will hold {} at its peak, beside activations, and send {} a step",
            bytes(self.plan.total()),
            bytes(self.plan.sent_per_step())
        ));
        if let Some(text) = tiers::announcement(config, self.model.file_access().as_ref()) {
            say(&text);
        }
    }

    fn lr(&self, step: u64) -> f64 {
        let train = &self.job.config.train;
        train.schedule.rate(train.lr, step, train.warmup_steps, self.job.config.run.steps)
    }

    fn step(&mut self, step: u64, lr: f64) -> Result<StepOutcome, RunError> {
        let (job, device, data) = (self.job, &self.device, &self.data);
        let micro_batch = job.config.train.micro_batch;
        let first_sample = (step - 1) * job.config.train.global_batch as u64;
        let outcome = self.model.try_step(job.schedule.micro_batches(), lr, |model: &LanguageModel, m| {
            let samples = first_sample + (m * micro_batch) as u64;
            let (ids, targets) = load_batch(data, samples, micro_batch, device)?;
            Ok::<_, RunError>(model.loss(ids, targets))
        });
        outcome.map_err(|error| match error {
            StepError::Shard(error) => error.into(),
            StepError::Loss(error) => error,
        })
    }

    /// The step's line of metrics, equal on all ranks.
    fn metrics(&mut self, outcome: &StepOutcome, lr: f64, begun: Instant) -> Result<StepMetrics, RunError> {
        let traffic = self.model.tier_traffic();
        let figures = Figures::of_step(&outcome.report, &self.before, &traffic);
        self.before = traffic;
        let own = [self.peak.bytes(), outcome.report.gathered_bytes_peak, outcome.report.bytes_sent];
        let own: Vec<u8> = own.into_iter().chain(figures.words()).flat_map(u64::to_le_bytes).collect();
        let all = self.group.all_gather_bytes("metrics", &own)?;
        let figure = |bytes: &Vec<u8>, i: usize| {
            bytes.get(i * 8..i * 8 + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        let most = |i| all.iter().map(|b| figure(b, i)).max().unwrap_or(0);
        let of_rank = |b| Figures::from_words(std::array::from_fn(|word| figure(b, 3 + word)));
        let of_all = all.iter().map(of_rank).fold(Figures::default(), |sum, one| sum.and(&one));
        self.moved = [self.moved[0].and(&figures), self.moved[1].and(&of_all)];
        let step_seconds = begun.elapsed().as_secs_f64();
        let tokens = (self.job.config.train.global_batch * self.job.seq_len) as u64;
        Ok(StepMetrics {
            step: outcome.report.step,
            loss: outcome.loss,
            grad_norm: outcome.report.grad_norm,
            clip_coefficient: outcome.report.clip_coefficient,
            loss_scale: outcome.report.loss_scale,
            skipped: outcome.report.skipped.is_some(),
            lr,
            tokens,
            tokens_per_second: tokens as f64 / step_seconds,
            step_seconds,
            peak_rss_bytes: most(0),
            gathered_bytes_peak: most(1),
            bytes_sent: all.iter().map(|b| figure(b, 2)).sum(),
            moved: of_all.moved(self.has),
        })
    }

    /// Writes the model and the summary, and shows what the run has come to.
    fn end(&mut self, output: &Path, all: &[StepMetrics], seconds: f64, sent: u64) -> Result<(), RunError> {
        let folder = output.join(MODEL);
        let averages = self.job.config.train.ema_decay.map(|_| output.join(AVERAGES));
        // A model that has diverged must not take a good one's place: it computes before it is written.
        let job = self.job;
        let write = |model: &mut ShardedModel<LanguageModel>, folder: &Path| {
            export::write(model, &job.model, job.tokenizer.as_ref(), folder)
        };
        let written = self.continue_data().and_then(|tokens| {
            if let Some(folder) = &averages {
                self.model.with_averages(|model| write(model, folder))?;
            }
            write(&mut self.model, &folder)?;
            Ok(tokens)
        });
        let tokens = written.map_err(|error| match error {
            RunError::Failed(message) => RunError::Failed(format!(
                "after the last step: {message} (no model was written; {} is as it was before the run)",
                folder.display()
            )),
            other => other,
        })?;
        let ranks = self.gather_summaries(sent)?;
        if !self.is_first() {
            return Ok(());
        }
        let summary = self.summary(all, seconds, ranks);
        let text = serde_json::to_string_pretty(&summary).map_err(RunError::failed)?;
        write_whole(&output.join(SUMMARY), text.as_bytes())?;
        let mut text = self.sample(&tokens).unwrap_or_default();
        text.push_str(&format!(
            "{}\nloss {:.4} -> {:.4} in {}, {:.0} s, {} tokens/s\n",
            rank_table(&summary.ranks_held),
            summary.first_loss,
            summary.last_loss,
            counted(summary.steps, "step"),
            seconds,
            thousands(summary.tokens_per_second.round() as u64)
        ));
        text.push_str(&format!("{}: {METRICS}, {SUMMARY}\n", output.display()));
        text.push_str(&format!("{}: the model, a Hugging Face folder\n", folder.display()));
        if let Some(folder) = averages {
            text.push_str(&format!("{}: the average of its weights\n", folder.display()));
        }
        print(&text)
    }

    /// Tokens of the data and their continuation by the model, computed by all ranks together: enough for a text to look
    /// at, or a single one where there is no tokenizer. Empty when the model knows the start of no sample.
    fn continue_data(&mut self) -> Result<Vec<u32>, RunError> {
        let prompt = self.prompt()?;
        if prompt.is_empty() {
            return Ok(prompt);
        }
        let count = if self.job.tokenizer.is_some() { SAMPLE_TOKENS } else { 1 };
        let mut sampler = Sampler::new(0.8, Some(40), self.job.config.run.seed).map_err(RunError::failed)?;
        let ids =
            continue_tokens(&mut self.model, &mut sampler, &prompt, [count, self.job.seq_len], |_| Ok(()))?;
        Ok([prompt, ids].concat())
    }

    /// The text of `tokens` with its heading; `None` without a tokenizer that can tell it.
    fn sample(&self, tokens: &[u32]) -> Option<String> {
        let text = self.job.tokenizer.as_ref()?.decode(tokens).ok().filter(|_| !tokens.is_empty())?;
        // Whatever the model has learnt to write must not drive a terminal, nor be taken for the report.
        let text = harmless(&text);
        Some(format!(
            "\nA sample from the trained model, continuing {PROMPT_TOKENS} tokens of its data:\n\n{text}\n\n"
        ))
    }

    /// The start of one of the first samples that has only tokens that the model knows: the one with most letters, so that
    /// it is text and not a table of numbers.
    fn prompt(&self) -> Result<Vec<u32>, RunError> {
        let vocab_size = self.job.model.vocab_size();
        let mut best = (Vec::new(), 0);
        for sample in 0..self.data.num_windows().min(PROMPT_CANDIDATES) {
            let (mut ids, _) = self.data.sample(sample).map_err(RunError::failed)?;
            ids.truncate(PROMPT_TOKENS);
            if ids.iter().any(|id| *id as usize >= vocab_size) {
                continue;
            }
            let text = self.job.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(&ids).ok());
            let letters = 1 + text.unwrap_or_default().chars().filter(|c| c.is_alphabetic()).count();
            if letters > best.1 {
                best = (ids, letters);
            }
        }
        Ok(best.0)
    }

    fn gather_summaries(&self, sent: u64) -> Result<Vec<RankSummary>, RunError> {
        let mut own = RankSummary::new(self.group.rank(), &self.model.ledger(), &self.plan);
        own.bytes_sent = sent;
        own.moved = self.moved[0].moved(self.has);
        own.staging_bytes = self.group.staging_bytes();
        let text = serde_json::to_vec(&own).map_err(RunError::failed)?;
        let all = self.group.all_gather_varied("summaries", &text)?;
        all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(RunError::failed)).collect()
    }

    fn summary(&self, all: &[StepMetrics], seconds: f64, ranks_held: Vec<RankSummary>) -> Summary {
        let rates: Vec<f64> = all.iter().map(|m| m.tokens_per_second).collect();
        Summary {
            name: self.job.config.run.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            family: self.job.model.family().into(),
            parameters: self.model.layouts().iter().map(|l| l.numel() as u64).sum(),
            ranks: self.group.size(),
            strategy: self.job.config.shard.strategy.to_string(),
            steps: all.len() as u64,
            tokens: all.iter().map(|m| m.tokens).sum(),
            first_loss: all.first().map_or(f64::NAN, |m| m.loss),
            last_loss: all.last().map_or(f64::NAN, |m| m.loss),
            tokens_per_second: median(&rates),
            training_seconds: seconds,
            moved: self.moved[1].moved(self.has),
            ranks_held,
        }
    }
}

/// Makes the output folder and takes it for this run: everything that its end needs is tried now. The metrics of an earlier
/// run and its summary go; its model stays until there is a new one.
fn claim_output(output: &Path, with_averages: bool) -> Result<MetricsFile, RunError> {
    std::fs::create_dir_all(output)
        .map_err(|e| RunError::user(format!("cannot make the folder {}: {e}", output.display())))?;
    let _put_off = PutOff::new();
    let mut metrics = MetricsFile::claim(&output.join(METRICS))?;
    FolderWriter::check(output.join(MODEL)).map_err(RunError::user)?;
    if with_averages {
        FolderWriter::check(output.join(AVERAGES)).map_err(RunError::user)?;
    }
    let summary = output.join(SUMMARY);
    for path in [summary.with_extension("tmp"), summary] {
        remove(&path).map_err(|e| {
            RunError::user(format!(
                "cannot replace {}: {e}; move it away, or choose another run.output_dir",
                path.display()
            ))
        })?;
    }
    metrics.start()?;
    Ok(metrics)
}

/// Samples `first..first + count` as tensors of `[count, seq_len]`.
fn load_batch(
    data: &TokenDataset,
    first: u64,
    count: usize,
    device: &Device,
) -> Result<(Tensor<2, Int>, Tensor<2, Int>), RunError> {
    let (mut ids, mut targets): (Vec<i64>, Vec<i64>) = (Vec::new(), Vec::new());
    for sample in first..first + count as u64 {
        let (x, y) = data.sample(sample).map_err(RunError::failed)?;
        ids.extend(x.into_iter().map(i64::from));
        targets.extend(y.into_iter().map(i64::from));
    }
    let shape = [count, ids.len() / count];
    let tensor = |values| Tensor::from_data(TensorData::new(values, shape), device);
    Ok((tensor(ids), tensor(targets)))
}
