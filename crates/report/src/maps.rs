//! The weights of attention in one text, as pictures need them.

use std::path::Path;

use longwall_eval::suites::attention_stats::{LayerMap, TextWeights, WEIGHTS_FILE};
use serde::Serialize;

/// Most weights of an evaluation that a page shows: further layers are left out.
const MOST_WEIGHTS: usize = 2_000_000;

/// The weights of the layers of one evaluation.
#[derive(Serialize)]
pub(crate) struct Maps {
    tokens: Vec<String>,
    layers: Vec<Layer>,
    /// Layers that the page does not show.
    left_out: usize,
}

#[derive(Serialize)]
struct Layer {
    layer: usize,
    kind: String,
    shares: bool,
    heads: Vec<Head>,
}

#[derive(Serialize)]
struct Head {
    /// The size of the largest weight.
    largest: f32,
    /// Weights, as 127ths of the largest size: all of the first query, then of the second, and so on.
    weights: Vec<Option<i8>>,
}

impl Head {
    fn new(queries: &[Vec<Option<f32>>]) -> Self {
        let largest = queries.iter().flatten().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
        let scale = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let weight = |x: &Option<f32>| x.map(|x| (x * scale).round() as i8);
        Head { largest, weights: queries.iter().flatten().map(weight).collect() }
    }
}

impl Maps {
    fn new(TextWeights { tokens, layers }: TextWeights) -> Self {
        let size = |layer: &LayerMap| layer.heads.iter().flatten().map(Vec::len).sum::<usize>();
        let mut total = 0;
        let fits = |layer: &&LayerMap| {
            total += size(layer);
            total <= MOST_WEIGHTS
        };
        let shown = |layer: &LayerMap| Layer {
            layer: layer.layer,
            kind: layer.kind.clone(),
            shares: layer.shares,
            heads: layer.heads.iter().map(|queries| Head::new(queries)).collect(),
        };
        let shown: Vec<Layer> = layers.iter().take_while(fits).map(shown).collect();
        Maps { tokens, left_out: layers.len() - shown.len(), layers: shown }
    }
}

/// The weights in the folder of an evaluation, if it has any that can be read.
pub(crate) fn load(folder: &Path) -> Option<Maps> {
    let path = folder.join(WEIGHTS_FILE);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!("left out of the report: cannot read {}: {error}", path.display());
            return None;
        }
    };
    let weights = serde_json::from_slice(&bytes);
    let left_out = |error| tracing::warn!("left out of the report: {}: {error}", path.display());
    weights.map_err(left_out).ok().map(Maps::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(layer: usize, tokens: usize) -> LayerMap {
        let queries = (0..tokens).map(|query| vec![Some(0.5); query + 1]).collect();
        LayerMap { layer, kind: "rope".to_owned(), shares: false, heads: vec![queries; 4] }
    }

    #[test]
    fn weights_are_rounded_and_keep_their_sign() {
        let head = Head::new(&[vec![Some(-0.5)], vec![Some(0.25), None]]);
        assert_eq!((head.largest, head.weights), (0.5, vec![Some(-127), Some(64), None]));
        assert_eq!(Head::new(&[vec![Some(0.0)]]).weights, [Some(0)]);
    }

    #[test]
    fn a_page_leaves_out_the_last_layers_of_a_large_text() {
        let layers = (0..5).map(|at| layer(at, 500)).collect();
        let maps = Maps::new(TextWeights { tokens: vec![], layers });
        assert_eq!((maps.layers.len(), maps.left_out), (3, 2));
        assert_eq!(maps.layers[2].heads[3].weights.len(), 500 * 501 / 2);
    }

    #[test]
    fn a_folder_may_have_no_weights_or_a_damaged_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(load(dir.path()).is_none());
        std::fs::write(dir.path().join(WEIGHTS_FILE), "{").unwrap();
        assert!(load(dir.path()).is_none());
    }
}
