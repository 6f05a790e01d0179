//! Rows of a table by index, and the sum of gradients back into it.

use super::simd;

/// The rows `ids` of `table` (rows of `width`), one after the other.
///
/// # Panics
/// If an id is no row of the table.
pub fn gather(table: &[f32], width: usize, ids: &[usize]) -> Vec<f32> {
    check(table.len(), width, ids);
    let mut out = Vec::with_capacity(ids.len() * width);
    for &id in ids {
        out.extend_from_slice(&table[id * width..][..width]);
    }
    out
}

/// Adds row `i` of `rows` to row `ids[i]` of `table`, in order.
///
/// # Panics
/// If an id is no row of the table.
pub fn scatter_add(table: &mut [f32], width: usize, ids: &[usize], rows: &[f32]) {
    check(table.len(), width, ids);
    simd(
        #[inline(always)]
        || {
            for (&id, row) in ids.iter().zip(rows.chunks_exact(width.max(1))) {
                for (t, &r) in table[id * width..][..width].iter_mut().zip(row) {
                    *t += r;
                }
            }
        },
    );
}

fn check(len: usize, width: usize, ids: &[usize]) {
    let rows = len.checked_div(width).unwrap_or(0);
    if let Some(id) = ids.iter().find(|&&id| id >= rows) {
        panic!("id {id} is out of range: the embedding has {rows} rows");
    }
}
