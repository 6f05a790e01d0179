//! What a run tells: a line of metrics a step, progress for the eye, a table of what each rank held and sent.

use std::fs::{File, TryLockError};
use std::io::{BufWriter, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use shardwise_core::{MemoryPlan, Purpose};
use shardwise_engine::Ledger;

use crate::error::RunError;
use crate::memory::PeakProportional;
use crate::output::say;
pub use crate::traffic::Moved;

/// A line of `metrics.jsonl`. Memory figures are the maximum over ranks, `bytes_sent` is the sum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The step, counted from 1.
    pub step: u64,
    /// The mean loss over the step's tokens, before the update.
    pub loss: f64,
    /// The norm of the whole gradient, before clipping; `null` in the file when it was not finite.
    #[serde(deserialize_with = "number_or_null")]
    pub grad_norm: f64,
    /// What the gradient was multiplied by: below 1 when it was clipped.
    pub clip_coefficient: f32,
    /// What the losses were multiplied by before their backward.
    pub loss_scale: f64,
    /// Whether nothing was updated, because the gradient was not finite.
    pub skipped: bool,
    /// The learning rate.
    pub lr: f64,
    /// Tokens of the step.
    pub tokens: u64,
    /// Those tokens over `step_seconds`.
    pub tokens_per_second: f64,
    /// How long the step took, data and communication included.
    pub step_seconds: f64,
    /// The most resident memory so far, shared pages counted by their part.
    pub peak_rss_bytes: u64,
    /// The most bytes of full parameters held at a time.
    pub gathered_bytes_peak: u64,
    /// Bytes of parameters and gradients that ranks sent each other.
    pub bytes_sent: u64,
    /// What moved between tiers and across nodes, and what quantising took.
    #[serde(flatten)]
    pub moved: Moved,
}

/// JSON has no word for what is not finite but `null`.
fn number_or_null<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

/// What one rank held and sent over a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankSummary {
    /// The rank.
    pub rank: usize,
    /// Peak bytes by purpose, with the planned bytes.
    pub held: Vec<HeldBytes>,
    /// Peak bytes of the engine.
    pub ledger_peak_bytes: u64,
    /// What the plan said it would be.
    pub planned_bytes: u64,
    /// Memory of the transport beside it.
    pub staging_bytes: u64,
    /// The most resident memory, shared pages counted by their part.
    pub peak_rss_bytes: u64,
    /// Bytes of parameters and gradients sent to other ranks.
    pub bytes_sent: u64,
    /// What moved between tiers and across nodes, and what quantising took at most.
    #[serde(flatten)]
    pub moved: Moved,
}

/// The bytes held for one purpose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBytes {
    /// What for.
    pub purpose: String,
    /// The peak.
    pub bytes: u64,
    /// What the plan said.
    pub planned: u64,
}

impl RankSummary {
    /// The figures of this rank.
    pub fn new(rank: usize, ledger: &Ledger, plan: &MemoryPlan) -> Self {
        let held = Purpose::ALL
            .into_iter()
            .map(|purpose| HeldBytes {
                purpose: purpose.name().into(),
                bytes: ledger.peak(purpose),
                planned: plan.bytes(purpose),
            })
            .collect();
        Self {
            rank,
            held,
            ledger_peak_bytes: ledger.total_peak(),
            planned_bytes: plan.total(),
            staging_bytes: 0,
            peak_rss_bytes: PeakProportional::new().exact_bytes(),
            bytes_sent: 0,
            moved: Moved::default(),
        }
    }
}

/// `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The run's name.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The model family.
    pub family: String,
    /// Parameters of the model.
    pub parameters: u64,
    /// Ranks that shared it.
    pub ranks: usize,
    /// How.
    pub strategy: String,
    /// Steps done.
    pub steps: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// The loss of the first step.
    pub first_loss: f64,
    /// The loss of the last step.
    pub last_loss: f64,
    /// The median over steps.
    pub tokens_per_second: f64,
    /// The whole training loop.
    pub training_seconds: f64,
    /// What moved between tiers and across nodes in all, and what quantising took at most.
    #[serde(flatten)]
    pub moved: Moved,
    /// By rank.
    pub ranks_held: Vec<RankSummary>,
}

/// The file of metrics, written a line at a time.
pub struct MetricsFile {
    file: BufWriter<File>,
    path: String,
}

impl MetricsFile {
    /// Opens the file, or makes it, and holds it for this run as long as the value lives; what it holds stays until
    /// [`MetricsFile::start`]. Where the file system knows no locks, another run can hold it too.
    ///
    /// # Errors
    /// When it cannot be written, or another run holds it.
    pub fn claim(path: &Path) -> Result<Self, RunError> {
        let name = path.display().to_string();
        let opened = File::options().write(true).create(true).truncate(false).open(path);
        let file = opened.map_err(|e| RunError::user(format!("cannot write {name}: {e}")))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(RunError::user(format!(
                "another run is writing {name}; wait for its end, or give this run another run.output_dir"
            )));
        }
        Ok(Self { file: BufWriter::new(file), path: name })
    }

    /// Starts the file afresh.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn start(&mut self) -> Result<(), RunError> {
        let emptied = self.file.get_ref().set_len(0);
        emptied.map_err(|e| RunError::user(format!("cannot write {}: {e}", self.path)))
    }

    /// Adds a line and hands it to the system.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn add(&mut self, metrics: &StepMetrics) -> Result<(), RunError> {
        let line = serde_json::to_string(metrics).map_err(RunError::failed)?;
        writeln!(self.file, "{line}")
            .and_then(|()| self.file.flush())
            .map_err(|e| RunError::failed(format!("writing {}: {e}", self.path)))
    }
}

/// Writes a file as a whole or not at all.
///
/// # Errors
/// When it cannot be written.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), RunError> {
    let failed = |e: std::io::Error| RunError::failed(format!("writing {}: {e}", path.display()));
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary).map_err(failed)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.and_then(|()| std::fs::rename(&temporary, path)).map_err(|e| {
        // The half-written file is of no use to anyone; if it cannot be removed the error below still says where it is.
        let _ = std::fs::remove_file(&temporary);
        failed(e)
    })
}

/// Progress for the eye: a live line on a terminal, a line now and then elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    every: u64,
    last: Instant,
}

impl Progress {
    /// For a run of `steps`.
    pub fn new(steps: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{bar:8} {wide_msg} {eta} left") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, steps, every: (steps / 20).max(1), last: Instant::now() }
    }

    /// Shows a step.
    pub fn show(&mut self, metrics: &StepMetrics) {
        let line = format!(
            "step {:>width$}/{}  loss {:.4}  {} tokens/s  {} a rank",
            metrics.step,
            self.steps,
            metrics.loss,
            thousands(metrics.tokens_per_second.round() as u64),
            bytes(metrics.peak_rss_bytes),
            width = self.steps.to_string().len()
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(metrics.step);
                bar.set_message(line);
            }
            None => {
                let due =
                    metrics.step.is_multiple_of(self.every) || self.last.elapsed() > Duration::from_secs(10);
                if due || metrics.step == 1 || metrics.step == self.steps {
                    self.last = Instant::now();
                    say(&line);
                }
            }
        }
    }

    /// Leaves the last line on the terminal.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// The table of what each rank held and sent.
pub fn rank_table(ranks: &[RankSummary]) -> String {
    let mut header = vec!["held at the peak".to_string()];
    header.extend(ranks.iter().map(|r| format!("rank {}", r.rank)));
    header.push("planned".into());
    let mut rows = vec![header];
    let purposes: Vec<&str> =
        ranks.first().map(|r| r.held.iter().map(|h| h.purpose.as_str()).collect()).unwrap_or_default();
    // What a configuration does not need has no row.
    let is_held = |index: usize| {
        ranks.iter().filter_map(|r| r.held.get(index)).any(|held| held.bytes > 0 || held.planned > 0)
    };
    for (index, purpose) in purposes.iter().enumerate().filter(|(index, _)| is_held(*index)) {
        let mut row = vec![(*purpose).to_string()];
        row.extend(ranks.iter().map(|r| r.held.get(index).map_or_else(String::new, |h| bytes(h.bytes))));
        row.push(ranks[0].held.get(index).map_or_else(String::new, |h| bytes(h.planned)));
        rows.push(row);
    }
    let mut add = |name: &str, of: &dyn Fn(&RankSummary) -> u64, planned: Option<u64>| {
        let mut row = vec![name.to_string()];
        row.extend(ranks.iter().map(|r| bytes(of(r))));
        row.push(planned.map_or_else(String::new, bytes));
        rows.push(row);
    };
    add("all of it", &|r| r.ledger_peak_bytes, ranks.first().map(|r| r.planned_bytes));
    add("staging, beside it", &|r| r.staging_bytes, None);
    add("resident (with activations)", &|r| r.peak_rss_bytes, None);
    add("sent in all", &|r| r.bytes_sent, None);
    let mut add_moved = |name: &str, of: &dyn Fn(&Moved) -> Option<u64>| {
        if ranks.iter().any(|r| of(&r.moved).is_some()) {
            add(name, &|r| of(&r.moved).unwrap_or(0), None);
        }
    };
    add_moved("of that across nodes", &|m| m.bytes_sent_across);
    add_moved("read from the host", &|m| m.host_bytes_read);
    add_moved("written to the host", &|m| m.host_bytes_written);
    add_moved("read from files", &|m| m.nvme_bytes_read);
    add_moved("written to files", &|m| m.nvme_bytes_written);
    if ranks.iter().any(|r| r.moved.io_overlap.is_some()) {
        let share = |r: &RankSummary| format!("{:.0} %", 100.0 * r.moved.io_overlap.unwrap_or(0.0));
        rows.push(
            std::iter::once("files, not waited for".to_string()).chain(ranks.iter().map(share)).collect(),
        );
    }
    table(&rows)
}

/// Rows in columns: the first left-aligned, the others right-aligned, a rule under the header.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(c, (cell, &w))| if c == 0 { format!("{cell:<w$}") } else { format!("{cell:>w$}") })
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
        if index == 0 {
            text.push_str(&"-".repeat(widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1)));
            text.push('\n');
        }
    }
    text
}

/// Bytes in the unit that leaves one to four digits before the point.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A number with its thousands set apart.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of things: `1 rank`, `2 ranks`.
pub fn counted(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", thousands(n), if n == 1 { "" } else { "s" })
}

/// The middle of the values (the mean of the two middle ones for an even count); 0 for none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([0, 999, 1000, 1234567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0, 1023, 1024, 1536, 5 << 30].map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB"]
        );
        assert_eq!([median(&[]), median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])], [0.0, 2.0, 2.5]);
    }

    #[test]
    fn a_table_lines_up() {
        let rows = [["what", "n"], ["first", "10"], ["x", "5"]].map(|r| r.map(String::from).to_vec());
        assert_eq!(table(&rows), "what    n\n---------\nfirst  10\nx       5\n");
    }
}
