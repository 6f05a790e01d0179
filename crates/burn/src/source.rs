//! Where the first values of parameters come from, if not from the module's own initialisers.

use std::ops::Range;

/// Values for parameters by path: a checkpoint, a file, a formula.
pub trait ParamSource {
    /// Writes elements `elements` (row-major) of the parameter `path`, whose whole shape is `shape`, to `out`. Returns
    /// false when it has no such parameter; the module's own initialiser is used then.
    ///
    /// # Errors
    /// A message that says what is wrong with the values and what to do.
    fn fill(
        &self,
        path: &str,
        shape: &[usize],
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Result<bool, String>;
}

/// No values: every parameter is initialised by the module.
impl ParamSource for () {
    fn fill(&self, _: &str, _: &[usize], _: Range<usize>, _: &mut [f32]) -> Result<bool, String> {
        Ok(false)
    }
}
