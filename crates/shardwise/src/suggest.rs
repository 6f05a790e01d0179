//! Which known name a misspelt one may have meant.

/// The nearest of `known` to `word`, if it is near enough to be meant.
pub(crate) fn nearest<'a>(word: &str, known: &'a [String]) -> Option<&'a str> {
    let (best, distance) = known.iter().map(|k| (k, edit_distance(word, k))).min_by_key(|(_, d)| *d)?;
    // A third of the letters may be wrong.
    (distance <= word.len().max(best.len()).div_ceil(3)).then_some(best.as_str())
}

/// Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_names_find_their_meaning() {
        let known = ["global_batch", "micro_batch", "lr", "warmup_steps", "strategy"].map(String::from);
        for (word, want) in [
            ("globl_batch", Some("global_batch")),
            ("microbatch", Some("micro_batch")),
            ("warmup_step", Some("warmup_steps")),
            ("rl", Some("lr")),
            ("stratgey", Some("strategy")),
            ("temperature", None),
        ] {
            assert_eq!(nearest(word, &known), want, "{word}");
        }
    }
}
