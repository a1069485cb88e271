//! The names of the evaluations that a configuration lists.

use longwall_config::Problems;
use toml::{Table, Value};

/// The names that [`is_folder_name`] allows, in words.
pub const FOLDER_NAME: &str =
    "the name of a folder, which holds no / or \\ and does not begin with a dot";

/// Whether `name` names a folder that stays within the one it is for.
pub fn is_folder_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// The name of an evaluation, and of its folder in the run's `eval/`: the table's `out`, else its `suite`.
pub fn eval_name(eval: &Table) -> Option<&str> {
    eval.get("out").or_else(|| eval.get("suite")).and_then(Value::as_str)
}

/// Records every `[[eval]]` table without a suite, and every name that is no folder's or is there twice.
pub fn validate_evals(evals: &[Table], problems: &mut Problems) {
    let show = |value: Option<&Value>| value.map_or_else(|| "missing".to_owned(), Value::to_string);
    for (at, eval) in evals.iter().enumerate() {
        let (suite, out) = (eval.get("suite"), eval.get("out"));
        problems.check(
            suite.is_some_and(Value::is_str),
            format!("eval.{at}.suite"),
            show(suite),
            "the name of a suite",
            "add for example suite = \"passkey\"",
        );
        problems.check(
            out.is_none_or(|out| out.as_str().is_some_and(is_folder_name)),
            format!("eval.{at}.out"),
            show(out),
            FOLDER_NAME,
            "use for example out = \"passkey-long\"",
        );
        let Some(name) = eval_name(eval) else { continue };
        let earlier = evals[..at].iter().position(|earlier| eval_name(earlier) == Some(name));
        problems.check(
            earlier.is_none(),
            format!("eval.{at}.out"),
            show(out),
            format!(
                "a name of its own: the results of eval.{} go to eval/{name} already",
                earlier.unwrap_or_default()
            ),
            format!("add for example out = \"{name}-2\", or join the two tables"),
        );
    }
}
