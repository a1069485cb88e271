//! What must be equal on all ranks: names and values.

use longwall_kernels::backend::OpBackend;

use super::store::host;
use super::{Collective, CollectiveError};

/// What must be equal on all ranks: names, as messages show them, and values.
pub type Facts = Vec<(String, String)>;

/// The first fact in which `theirs` differ from `ours`: its name, and both values.
pub(super) fn difference(ours: &Facts, theirs: &Facts) -> Option<[String; 3]> {
    let value = |facts: &Facts, name: &str| {
        let found = facts.iter().find(|(key, _)| key == name);
        found.map_or("(unset)".to_owned(), |(_, value)| value.clone())
    };
    let names = ours.iter().chain(theirs).map(|(name, _)| name);
    let both = |name: &String| [name.clone(), value(theirs, name), value(ours, name)];
    names.map(both).find(|[_, theirs, ours]| theirs != ours)
}

/// Returns when all ranks have called it, if their facts are equal.
///
/// # Errors
/// On all ranks, when facts of some differ from those of rank 0: the first one that does, and the ranks that have the
/// same other value. When a rank is lost.
pub(crate) fn check_equal<B: OpBackend>(
    collective: &dyn Collective<B>,
    facts: &Facts,
) -> Result<(), CollectiveError> {
    let own = serde_json::to_vec(&(host(), facts)).expect("texts have a JSON form");
    let read = |message: Vec<u8>| -> (String, Facts) {
        serde_json::from_slice(&message).expect("another rank's facts")
    };
    let all: Vec<_> = collective.all_gather(own)?.into_iter().map(read).collect();
    let of_rank = |rank: usize| difference(&all[0].1, &all[rank].1);
    let Some(first) = (1..all.len()).find_map(of_rank) else { return Ok(()) };
    let differing = (1..all.len()).filter(|&rank| of_rank(rank).as_ref() == Some(&first));
    let ranks = differing.map(|rank| (rank, all[rank].0.clone())).collect();
    let [what, theirs, ours] = first;
    Err(CollectiveError::Unequal { ranks, what, theirs, ours })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distributed::loopback;
    use crate::testing::TestBackend;

    fn errors(values: &[&str]) -> Vec<Option<String>> {
        std::thread::scope(|scope| {
            let ranks = loopback::ranks(values.len()).into_iter().zip(values);
            let start = |(rank, value): (loopback::Loopback, &&str)| {
                let facts = vec![
                    ("the tokenizer".to_owned(), "bytes".to_owned()),
                    ("the data".to_owned(), (*value).to_owned()),
                ];
                scope.spawn(move || check_equal::<TestBackend>(&rank, &facts).err())
            };
            let threads: Vec<_> = ranks.map(start).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Option<CollectiveError>>| {
                let error = thread.join().expect("no rank panics");
                error.map(|error| error.to_string().replace(&host(), "HOST"))
            };
            threads.into_iter().map(join).collect()
        })
    }

    #[test]
    fn ranks_that_differ_are_named_on_all_ranks() {
        assert_eq!(errors(&["7 tokens"; 3]), [None, None, None]);
        let told =
            "the data: 8 tokens on rank 1 (HOST), rank 3 (HOST), but 7 tokens on rank 0\n  hint:";
        for error in errors(&["7 tokens", "8 tokens", "7 tokens", "8 tokens"]) {
            assert!(error.as_ref().unwrap().starts_with(told), "{error:?}");
        }
    }
}
