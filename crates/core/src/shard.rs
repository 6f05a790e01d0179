//! Which elements of which parameters lie in a range of a flat parameter.

use std::ops::{Range, RangeInclusive};

use crate::layout::ParamInfo;

/// The part of one parameter that lies in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardedParam {
    /// The parameter's path.
    pub path: String,
    /// Its whole shape.
    pub shape: Vec<usize>,
    /// Its whole number of elements.
    pub numel: usize,
    /// The first and the last of ITS elements that lie here: `0..=numel-1` when all of it does.
    pub elements: RangeInclusive<usize>,
    /// Where those elements start in the shard.
    pub shard_offset: usize,
}

impl ShardedParam {
    /// The number of elements that lie here.
    pub fn len(&self) -> usize {
        self.elements.end() + 1 - self.elements.start()
    }

    /// Never true: a parameter without elements here is not listed.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The elements of the shard that belong to this parameter.
    pub fn shard_range(&self) -> Range<usize> {
        self.shard_offset..self.shard_offset + self.len()
    }
}

/// The parameters that overlap a shard, in order; empty for a rank that owns only padding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardMetadata {
    /// The overlapping parameters.
    pub params: Vec<ShardedParam>,
    /// Their indices in the layout's list of parameters. Parameters without elements inside it are part of the range.
    pub param_indices: Range<usize>,
}

impl ShardMetadata {
    /// The parameters that overlap `range` of the flat parameter; a range past the data is cut off.
    pub fn of_range(params: &[ParamInfo], range: Range<usize>) -> Self {
        let mut found: Vec<(usize, ShardedParam)> = Vec::new();
        for (index, param) in params.iter().enumerate() {
            let own = param.range();
            let (start, end) = (range.start.max(own.start), range.end.min(own.end));
            if start < end {
                found.push((
                    index,
                    ShardedParam {
                        path: param.path.clone(),
                        shape: param.shape.clone(),
                        numel: param.numel,
                        elements: start - own.start..=end - 1 - own.start,
                        shard_offset: start - range.start,
                    },
                ));
            }
        }
        let param_indices = match (found.first(), found.last()) {
            (Some((first, _)), Some((last, _))) => *first..last + 1,
            _ => 0..0,
        };
        Self { params: found.into_iter().map(|(_, p)| p).collect(), param_indices }
    }
}
