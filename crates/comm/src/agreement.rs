//! Whether all ranks were started with the same settings, and which is the first that differs.

use crate::Result;
use crate::error::CommError;
use crate::group::ProcessGroup;

impl ProcessGroup {
    /// Compares settings among the ranks: equal lists of `(name, value)` everywhere, or an error on every rank that
    /// names the first difference, both values and both ranks.
    ///
    /// # Errors
    /// When the lists differ, or a peer is lost or late.
    pub fn check_agreement(&self, what: &str, settings: &[(String, String)]) -> Result<()> {
        let mut text = String::new();
        for (name, value) in settings {
            text.push_str(&format!("{name}\u{1f}{value}\u{1e}"));
        }
        let all = self.all_gather_varied("settings", text.as_bytes())?;
        let lists: Vec<Vec<(String, String)>> = all.iter().map(|bytes| parse_settings(bytes)).collect();
        for (rank, list) in lists.iter().enumerate().skip(1) {
            if let Some(difference) = first_difference(&lists[0], list) {
                let (first, other) = (self.members()[0], self.members()[rank]);
                let message = difference.describe(what, first, other);
                return Err(CommError::Disagreement(message));
            }
        }
        Ok(())
    }
}

fn parse_settings(bytes: &[u8]) -> Vec<(String, String)> {
    String::from_utf8_lossy(bytes)
        .split_terminator('\u{1e}')
        .filter_map(|entry| entry.split_once('\u{1f}'))
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect()
}

/// A setting that two ranks do not share.
struct Difference {
    name: String,
    values: [Option<String>; 2],
}

impl Difference {
    fn describe(&self, what: &str, first: usize, other: usize) -> String {
        let value = |v: &Option<String>| v.as_ref().map_or("unset".to_string(), |v| format!("`{v}`"));
        format!(
            "ranks were started with different {what}: {} is {} on rank {first} but {} on rank {other}; start every rank \
             with the same {what}",
            self.name,
            value(&self.values[0]),
            value(&self.values[1])
        )
    }
}

fn first_difference(a: &[(String, String)], b: &[(String, String)]) -> Option<Difference> {
    let find = |list: &[(String, String)], name: &str| {
        list.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone())
    };
    let names = a.iter().chain(b).map(|(name, _)| name);
    for name in names {
        let values = [find(a, name), find(b, name)];
        if values[0] != values[1] {
            return Some(Difference { name: name.clone(), values });
        }
    }
    None
}
