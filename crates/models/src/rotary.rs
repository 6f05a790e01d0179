//! The angles of rotary embedding: constants, computed once for all blocks and steps.

use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Tensor, TensorData};

/// Cosines and sines of every position met so far.
///
/// Frequencies and angles are rounded to f32 where `transformers` rounds them: its models were trained with those, and at
/// late positions exact angles would differ.
#[derive(Debug)]
pub(crate) struct RotaryTables {
    /// One for each pair of columns of a head.
    frequencies: Vec<f32>,
    rows: Mutex<Rows>,
}

/// A row of each table for every position, from 0.
#[derive(Debug, Default)]
struct Rows {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryTables {
    /// The tables of heads of `head_dim` columns: pair `i` turns by `theta^(-2i / head_dim)` per position.
    pub(crate) fn new(theta: f64, head_dim: usize) -> Self {
        let frequency = |pair: usize| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            1.0 / (theta as f32).powf(exponent)
        };
        Self { frequencies: (0..head_dim / 2).map(frequency).collect(), rows: Mutex::default() }
    }

    /// Cosines and sines of positions `0..len`, each `[len, head_dim / 2]`.
    pub(crate) fn tables(&self, len: usize, device: &Device) -> (Tensor<2>, Tensor<2>) {
        let half = self.frequencies.len();
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        for position in rows.cos.len() / half..len {
            for frequency in &self.frequencies {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                rows.cos.push(cos as f32);
                rows.sin.push(sin as f32);
            }
        }
        let table = |values: &[f32]| {
            Tensor::from_data(TensorData::new(values[..len * half].to_vec(), [len, half]), device)
        };
        (table(&rows.cos), table(&rows.sin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_grow_and_keep_their_rows() {
        let device = Device::flex();
        let tables = RotaryTables::new(10000.0, 8);
        let values = |len| {
            let (cos, sin) = tables.tables(len, &device);
            assert_eq!((cos.dims(), sin.dims()), ([len, 4], [len, 4]));
            [cos, sin].map(|table| table.into_data().iter::<f32>().collect::<Vec<_>>())
        };
        let short = values(3);
        let long = values(70);
        for (short, long) in short.iter().zip(&long) {
            assert_eq!(short[..], long[..12]);
        }
        assert_eq!(values(3), short);
        // Frequencies 1, 1/10, 1/100, 1/1000.
        assert_eq!(long[0][..4], [1.0; 4]);
        for (pair, frequency) in [1.0, 0.1, 0.01, 0.001].into_iter().enumerate() {
            let angle: f64 = 69.0 * frequency;
            assert!((f64::from(long[0][69 * 4 + pair]) - angle.cos()).abs() < 1e-5);
            assert!((f64::from(long[1][69 * 4 + pair]) - angle.sin()).abs() < 1e-5);
        }
    }
}
