//! Applies the rules to the workspace.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_checks::dependencies::Graph;
use longhaul_checks::{documents, modules, policy, purity, refusals};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::{env, fs};

/// Folders without files of this project.
const SKIPPED: [&str; 6] = [
    ".git",
    ".lab",
    "target",
    "corpus",
    "artifacts",
    "node_modules",
];
/// Extensions of hand-written files.
const TEXTS: [&str; 9] = [
    "rs", "toml", "md", "sh", "service", "js", "html", "css", "yml",
];
/// Hand-written files without an extension.
const NAMED: [&str; 4] = ["Makefile", "run", "install", "end-to-end"];

/// Every text file of the repository, by its path from the root.
static FILES: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let mut files = BTreeMap::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let path = folder.join(&name);
            let kind = entry.file_type().unwrap();
            if kind.is_dir() && !SKIPPED.contains(&&name[..]) {
                folders.push(path);
                continue;
            }
            let ending = path
                .extension()
                .and_then(|ending| ending.to_str())
                .unwrap_or_default();
            if kind.is_file() && (TEXTS.contains(&ending) || NAMED.contains(&&name[..])) {
                // A file may disappear during the walk: only existing files count.
                if let Ok(text) = fs::read_to_string(entry.path()) {
                    files.insert(path.to_str().unwrap().to_owned(), text);
                }
            }
        }
    }
    assert!(files.contains_key("Cargo.toml") && files.contains_key("checks/src/lib.rs"));
    files
});

static GRAPH: LazyLock<Graph> = LazyLock::new(|| {
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--offline", "--locked", "--format-version", "1"])
        // Packages for other platforms need not be present.
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Graph::new(&String::from_utf8(output.stdout).unwrap()).unwrap()
});

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn none(findings: Vec<String>, help: &str) {
    assert!(findings.is_empty(), "{help}:\n  {}", findings.join("\n  "));
}

#[test]
fn cores_do_nothing_but_compute() {
    let mut findings = Vec::new();
    for core in policy::CORES {
        let folder = format!("crates/{}/src/", core.trim_start_matches("longhaul-"));
        let files = || FILES.iter().filter(|(path, _)| path.starts_with(&folder));
        let mut tests = Vec::new();
        for (path, text) in files() {
            let module = path.trim_end_matches("lib.rs").trim_end_matches("mod.rs");
            let module = module.trim_end_matches(".rs").trim_end_matches('/');
            tests.extend(
                purity::test_modules(text)
                    .iter()
                    .flat_map(|name| [format!("{module}/{name}.rs"), format!("{module}/{name}/")]),
            );
        }
        let mut seen = 0;
        for (path, text) in files() {
            if tests.iter().any(|test| path.starts_with(test)) {
                continue;
            }
            seen += 1;
            let found = purity::findings(text).unwrap_or_else(|error| vec![error]);
            findings.extend(found.iter().map(|finding| format!("{path}: {finding}")));
        }
        assert!(seen > 0, "no sources of {core}");
    }
    none(
        findings,
        "a core has no sockets, files, clocks, threads or async: pass these in",
    );
}

#[test]
fn cores_contain_no_packages_that_do_more() {
    none(
        GRAPH.core_findings(),
        "see CORE_DEPENDENCIES in checks/src/policy.rs",
    );
}

#[test]
fn dependencies_point_one_way() {
    none(
        GRAPH.direction_findings(),
        "see DIRECTION in checks/src/policy.rs",
    );
}

#[test]
fn the_ends_of_a_migration_do_not_know_each_other() {
    let folder = "crates/migration/src/";
    let mut findings = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for (path, text) in FILES.iter() {
        let Some(path) = path.strip_prefix(folder) else {
            continue;
        };
        let module = modules::module(path);
        let rules = policy::MIGRATION_MODULES.iter();
        match rules.clone().find(|(name, _)| *name == module) {
            Some((_, may)) => findings.extend(modules::findings(path, text, may)),
            None => findings.push(format!("{path}: module `{module}` is in no rule")),
        }
        seen.insert(module);
    }
    assert_eq!(seen.len(), policy::MIGRATION_MODULES.len(), "{seen:?}");
    none(findings, "see MIGRATION_MODULES in checks/src/policy.rs");
}

#[test]
fn no_ring_of_files_imports_each_other_in_a_migration() {
    let files = FILES.iter();
    let files = files.filter_map(|(path, text)| {
        Some((path.strip_prefix("crates/migration/src/")?, text.as_str()))
    });
    let rings = modules::rings(&files.collect::<Vec<_>>());
    let findings = rings.into_iter().map(|ring| ring.join(", "));
    none(
        findings.collect(),
        "move what they share to a file of its own",
    );
}

#[test]
fn a_migration_reaches_guests_through_their_manager() {
    assert!(FILES.contains_key(policy::MAKES_MANAGERS));
    let mut findings = Vec::new();
    let sources = FILES
        .iter()
        .filter(|(path, _)| path.starts_with("crates/migration/src/"));
    for (path, text) in sources.filter(|(path, _)| *path != policy::MAKES_MANAGERS) {
        let refused = modules::refused(text, &policy::BEHIND_MANAGERS).into_iter();
        findings.extend(refused.map(|(word, instead)| format!("{path}: `{word}`: use {instead}")));
    }
    none(findings, "see BEHIND_MANAGERS in checks/src/policy.rs");
}

/// Files of `crates/migration/src` whose refusals are not of a move: an operator's decisions, and
/// replicas, whose refusals are said when a replication begins
/// (`a_replication_begins_only_if_the_other_host_takes_it` in `longhaul/tests/refusals.rs`), and
/// devices of parcels (`a_terminal_gives_what_it_names_to_whom_it_allows` in
/// `longhaul/tests/terminal.rs`).
const NO_MOVES: [&str; 8] = [
    "left_behind.rs",
    "replicas/arrival.rs",
    "replicas/failover.rs",
    "replicas/mod.rs",
    "terminal/give.rs",
    "replication/mod.rs",
    "status/in_doubt.rs",
    "host/limited_hosts.rs",
];

#[test]
fn every_refusal_of_a_move_is_shown_in_a_plan() {
    let mut findings = Vec::new();
    for (path, text) in FILES.iter() {
        let Some(path) = path.strip_prefix("crates/migration/src/") else {
            continue;
        };
        if !NO_MOVES.contains(&path) {
            findings.extend(refusals::findings(path, text));
        }
    }
    for file in refusals::files() {
        if !FILES.contains_key(&format!("crates/migration/src/{file}")) {
            findings.push(format!("{file} is listed and does not exist"));
        }
    }
    for (file, test) in refusals::tests() {
        let exists = FILES
            .get(&format!("crates/{file}"))
            .is_some_and(|text| text.contains(&format!("fn {test}(")));
        if !exists {
            findings.push(format!("{file} has no test {test}"));
        }
    }
    none(
        findings,
        "a new refusal belongs into a plan, with a test; then list it in checks/src/refusals.rs",
    );
}

#[test]
fn licences_fit() {
    none(
        GRAPH.licence_findings(),
        "see LICENCES in checks/src/policy.rs",
    );
}

#[test]
fn packages_come_from_the_registry() {
    none(
        GRAPH.source_findings(),
        "packages come from crates.io or from this repository",
    );
}

#[test]
fn packages_are_built_in_one_version() {
    none(
        GRAPH.duplicate_findings(),
        "see DUPLICATES in checks/src/policy.rs",
    );
}

#[test]
fn files_are_not_too_long() {
    let sources = FILES.iter().filter(|(path, _)| !path.ends_with(".md"));
    let long = sources.filter(|(path, text)| documents::is_too_long(path, text));
    none(
        long.map(|(path, _)| path.clone()).collect(),
        "files of more than 800 lines",
    );
    let gone = policy::LONG_FILES
        .iter()
        .filter(|(path, _)| !FILES.contains_key(*path));
    none(
        gone.map(|(path, _)| (*path).to_owned()).collect(),
        "excused files that are gone",
    );
}

#[test]
fn lines_are_not_too_wide() {
    let mut findings = Vec::new();
    let texts = FILES
        .iter()
        .filter(|(path, _)| path.ends_with(".rs") || path.ends_with(".md"));
    let excused = |path: &str| policy::WIDE_DOCUMENTS.iter().any(|(wide, _)| *wide == path);
    for (path, text) in texts.filter(|(path, _)| !excused(path)) {
        let lines = documents::wide_lines(path, text).into_iter();
        findings.extend(lines.map(|line| format!("{path}:{line}")));
    }
    none(findings, "lines of more than 100 columns");
}

#[test]
fn documents_speak_as_the_glossary_says() {
    let mut findings = Vec::new();
    // The glossary itself names what is not used.
    let texts = FILES
        .iter()
        .filter(|(path, _)| path.ends_with(".md") && *path != "docs/words.md");
    for (path, text) in texts {
        let found = documents::refused_phrases(text);
        findings.extend(found.iter().map(|finding| format!("{path}: {finding}")));
    }
    none(
        findings,
        "see docs/words.md, and PHRASES in checks/src/policy.rs",
    );
}

#[test]
fn links_lead_somewhere() {
    let mut findings = Vec::new();
    for (path, text) in FILES.iter().filter(|(path, _)| path.ends_with(".md")) {
        for link in documents::links(text) {
            let target = documents::target(Path::new(path), &link);
            let there = target.filter(|target| root().join(target).exists());
            let heading = link.heading.as_ref();
            let leads = there.is_some_and(|target| {
                let text = FILES.get(target.to_str().unwrap());
                heading.is_none_or(|name| {
                    text.is_some_and(|text| documents::headings(text).contains(name))
                })
            });
            if !leads {
                findings.push(format!("{path}: {link:?}"));
            }
        }
    }
    none(findings, "links that lead nowhere");
}

#[test]
fn nobodys_folders_are_named() {
    let mut findings = Vec::new();
    for (path, text) in FILES.iter() {
        let found = documents::machine_paths(text);
        findings.extend(found.iter().map(|line| format!("{path}: {line}")));
    }
    none(findings, "paths that exist on one machine only");
}
