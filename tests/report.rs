//! A report of real runs, and of none.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use crate::support::{Workspace, sweep};

/// The data in a page.
fn data(html: &str) -> serde_json::Value {
    let (_, rest) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

const PASSKEY: &str = "\n[[eval]]\nsuite = \"passkey\"\nlengths = [300]\ntrials = 6\n";
const MAP: &str = "\n[[eval]]\nsuite = \"attention-stats\"\ntokens = \"let x\"\n";

#[test]
fn a_report_of_two_runs_holds_all_that_it_shows() {
    let w = Workspace::new();
    let evil = "</script><script>alert('out')</script>";
    let sample = format!(
        "\n[train.sample]\nevery = 20\nprompts = [{evil:?}]\ntokens = 4\n\n[[train.evaluate]]\nsuite = \"passkey\"\nout = \"loop\"\nevery = 20\nlengths = [300]\ntrials = 2\n"
    );
    w.write("both.toml", &format!("{}{sample}{PASSKEY}{MAP}", crate::support::CONFIG));
    let train = |name: &str, kind: &str| {
        let (name, kind) = (format!("run.name={name}"), format!("model.attention.kind={kind}"));
        w.succeed(&["train", "--config", "both.toml", "--set", &name, "--set", &kind]);
    };
    train("a", "rope");
    train("b", "fox");
    assert_eq!(w.succeed(&["report", "runs/a", "runs/b"]).trim(), "runs/a/report.html");
    let html = w.read("runs/a/report.html");

    // Nothing is loaded, and no data can end the script that holds them.
    assert!(!html.contains("src=") && !html.contains("<link") && !html.contains("@import"));
    assert!(!html.contains(evil), "a prompt became HTML");
    assert_eq!(html.matches("</script>").count(), 3);
    let data = data(&html);
    assert!(data["runs"][0]["samples"][0]["title"].as_str().unwrap().contains("</script>"));

    let differences = data["differences"].as_array().unwrap();
    let kind = differences.iter().find(|row| row["key"] == "model.attention.kind").unwrap();
    assert_eq!(kind["values"], serde_json::json!(["\"rope\"", "\"fox\""]));
    let attention = |row: &serde_json::Value| row["key"].as_str().unwrap().starts_with("model.att");
    assert!(differences.iter().all(attention), "{differences:?}");
    assert_eq!(data["runs"][1]["training"]["loss"].as_array().unwrap().len(), 40);
    assert!(data["runs"][1]["training"]["flops"][39].as_f64().unwrap() > 1e6);
    assert!(data["runs"][0]["positions"]["points"].as_array().unwrap().len() > 5);
    let in_loop = |e: &&serde_json::Value| e["in_loop"] == true && e["run"] == 0;
    let evaluations = data["evaluations"].as_array().unwrap();
    assert_eq!(evaluations.iter().filter(in_loop).count(), 2);
    assert_eq!(data["samples"]["passkey"].as_array().unwrap().len(), 6);
    assert_eq!(data["samples"]["passkey"][0]["answers"].as_array().unwrap().len(), 2);
    let maps: Vec<_> = evaluations.iter().map(|e| &e["maps"]).filter(|x| x.is_object()).collect();
    assert_eq!(maps.len(), 2);
    let size = maps[0]["tokens"].as_array().unwrap().len();
    let head = maps[0]["layers"][0]["heads"][0]["weights"].as_array().unwrap();
    assert_eq!((head.len(), &head[0]), (size * (size + 1) / 2, &127.into()));
    // Neither model finds a passkey: the pairs do not differ.
    let row = |metric: &str| {
        let rows = data["table"].as_array().unwrap();
        rows.iter().find(|row| row["metric"] == metric).unwrap()["cells"].clone()
    };
    let difference = &row("passkey: accuracy")[1]["difference"];
    assert_eq!((&difference["n"], &difference["of"]), (&6.into(), &"samples".into()));
    assert_eq!(difference["marked"], false);
    assert!(row("validation loss")[1]["difference"].is_null(), "one seed shows no difference");

    // As of runs that were copied without their samples.
    for run in ["a", "b"] {
        std::fs::remove_file(w.path(&format!("runs/{run}/eval/passkey/samples.jsonl"))).unwrap();
    }
    w.succeed(&["report", "runs/a", "runs/b"]);
    let data = self::data(&w.read("runs/a/report.html"));
    assert!(data["samples"].get("passkey").is_none());
    let rows = data["table"].as_array().unwrap();
    let cells = &rows.iter().find(|row| row["metric"] == "passkey: accuracy").unwrap()["cells"];
    assert!(cells[1]["mean"].is_number() && cells[1]["difference"].is_null(), "{cells}");
}

#[test]
fn a_report_of_a_sweep_groups_its_seeds() {
    let w = Workspace::new();
    w.write("compare.toml", &sweep("0, 1, 2", 640));
    w.succeed(&["sweep", "compare.toml"]);
    w.succeed(&["report", "runs/compare", "--output", "page.html"]);
    let data = data(&w.read("page.html"));
    let names: Vec<&str> =
        data["groups"].as_array().unwrap().iter().map(|g| g["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["fox", "rope"]);
    let row = &data["table"][0];
    assert_eq!(row["metric"], "validation loss");
    assert_eq!(row["cells"][0]["n"], 3);
    assert!(row["cells"][0]["error"].as_f64().unwrap() > 0.0);
    let difference = &row["cells"][1]["difference"];
    assert_eq!((&difference["n"], &difference["of"]), (&3.into(), &"seeds".into()));
    assert!(difference["adjusted"].as_f64() >= difference["p"].as_f64());
    // The curve by position of the suite, with its intervals.
    let with_positions = |e: &&serde_json::Value| e["positions"].is_array();
    assert_eq!(data["evaluations"].as_array().unwrap().iter().filter(with_positions).count(), 6);
}

#[test]
fn folders_without_runs_are_refused() {
    let w = Workspace::new();
    insta::assert_snapshot!("report_of_a_folder_without_runs", w.fail(&["report", "corpus"]));
    insta::assert_snapshot!("report_of_a_missing_folder", w.fail(&["report", "runs/none"]));
    w.train("tiny", &["train.tokens=256"]);
    let error = w.fail(&["report", "runs/tiny", "--output", "no/such/page.html"]);
    insta::assert_snapshot!("report_to_a_missing_folder", error);
}

/// The server, which is killed when the test ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The status and the body that answer a GET request for `path`, with this `Host`.
fn get(address: &str, path: &str, host: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[test]
fn a_watched_report_follows_a_run() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=2560"]);
    let mut command = w.command(&["report", "--watch", "runs", "--port", "0"]);
    let mut server = Server(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(server.0.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    let address = line.trim().trim_start_matches("http://").trim_end_matches('/').to_owned();
    assert!(address.starts_with("127.0.0.1:"), "{line}");

    let page = data(&get(&address, "/", &address).1);
    assert_eq!(page["runs"][0]["step"], 20);
    let since = format!("/data.json?since={}", page["version"].as_str().unwrap());
    assert_eq!(get(&address, &since, &address), (204, String::new()));
    w.succeed(&["train", "--resume", "runs/tiny", "--set", "train.tokens=5120"]);
    let (status, body) = get(&address, &since, &address);
    let page: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &page["runs"][0]["step"]), (200, &40.into()));

    // A page elsewhere whose name resolves to this machine reads nothing.
    assert_eq!(get(&address, "/", "evil.example").0, 403);
    assert_eq!(get(&address, "/etc/passwd", &address).0, 404);
}
