//! The heads of a layer in equal parts, each of which is computed apart, as on several devices.

use super::{AttentionShape, VariantSpec};

/// How the parts take a tensor's heads, features or elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// Each part takes its own, in the order of the parts.
    Split,
    /// Each part takes all.
    Shared,
}

impl Division {
    /// Of a tensor with so many heads, features or elements in the `whole` layer and in one `part` of `parts`.
    fn of(whole: usize, part: usize, parts: usize) -> Self {
        if whole == part {
            return Division::Shared;
        }
        assert_eq!(whole, part * parts, "what {parts} parts take");
        Division::Split
    }
}

/// One of several equal parts of a layer's heads: what computes it, and what it takes of the layer's
/// [`Inputs`](super::Inputs). Values are split, and so are the outputs: part n has the n-th of the consecutive heads.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadParts<C> {
    /// The configuration of a part.
    pub variant: C,
    /// The shape of a part.
    pub shape: AttentionShape,
    /// Heads of each view's queries.
    pub q: Division,
    /// Heads of each view's keys.
    pub k: Division,
    /// Features of the projections.
    pub projections: Vec<Division>,
    /// Elements of the learned vectors.
    pub parameters: Vec<Division>,
}

impl<V: VariantSpec> HeadParts<V> {
    /// A part of `parts`; `None` if they do not divide the layer's heads, or if the heads cannot be computed apart.
    pub fn of(variant: &V, shape: &AttentionShape, parts: usize) -> Option<Self> {
        if !shape.kv_heads.is_multiple_of(parts) {
            return None;
        }
        let (part, part_shape) = (variant.part_of_heads(parts)?, shape.part_of_heads(parts));
        let division = |size: &dyn Fn(&V, &AttentionShape) -> usize| {
            Division::of(size(variant, shape), size(&part, &part_shape), parts)
        };
        let projections =
            |at: usize| division(&|variant, shape| variant.projections(shape)[at].features);
        let parameters =
            |at: usize| division(&|variant, shape| variant.parameters(shape)[at].elements);
        Some(HeadParts {
            q: division(&V::query_heads),
            k: division(&V::key_heads),
            projections: (0..variant.projections(shape).len()).map(projections).collect(),
            parameters: (0..variant.parameters(shape).len()).map(parameters).collect(),
            variant: part,
            shape: part_shape,
        })
    }

    /// The same part of a layer whose configuration is another type's.
    pub fn map<C>(self, configuration: impl FnOnce(V) -> C) -> HeadParts<C> {
        let HeadParts { variant, shape, q, k, projections, parameters } = self;
        HeadParts { variant: configuration(variant), shape, q, k, projections, parameters }
    }
}
