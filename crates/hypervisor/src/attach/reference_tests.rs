//! Writes the reference of what a guest may have, and checks that it is the code's.

use super::describe::KEPT_HERE;
use super::more_options;
use super::options::{Meaning, OPTIONS};
use crate::hardware::tables::{self, Bus, Model};
use crate::observe::IMMOVABLE;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/qemu-guests.md");

const HEAD: &str = "\
# What a guest of QEMU may have

This page lists what Longhaul knows of a QEMU that something else started: the options of its
command line, the models of its devices, and the settings of its machine. It is written from the
code, and a test compares the two. [Operating](operating.md#guests-that-something-else-started) has
the rules in words.

`longhaul guests attach`, `longhaul plan` and `longhaul migrate` refuse what is not on this page, by
its name. Properties of devices that QEMU sets by itself need not be listed.
";

fn page() -> String {
    let mut page = HEAD.to_owned();
    options(&mut page);
    models(&mut page);
    settings(&mut page);
    page
}

fn options(page: &mut String) {
    let all: BTreeMap<&str, Meaning> = OPTIONS
        .iter()
        .chain(more_options::OPTIONS)
        .map(|(name, _, meaning)| (*name, *meaning))
        .collect();
    let named = |wanted: fn(&Meaning) -> bool| {
        let names = all.iter().filter(|(_, meaning)| wanted(meaning));
        listed(names.map(|(name, _)| format!("-{name}")))
    };
    let machine = named(|meaning| matches!(meaning, Meaning::Machine));
    let local = named(|meaning| matches!(meaning, Meaning::Local));
    let _ = write!(
        page,
        "\n## Options\n\nRead, and made again at the destination:\n\n{machine}\n\n\
         Of this host only, or read from QEMU itself instead:\n\n{local}\n\n\
         Refused:\n\n| option | why | what to do |\n|---|---|---|\n"
    );
    for (name, meaning) in &all {
        if let Meaning::Never(why, hint) = meaning {
            let _ = writeln!(page, "| `-{name}` | {why} | {hint} |");
        }
    }
}

fn models(page: &mut String) {
    page.push_str("\n## Devices\n\n| bus | models |\n|---|---|\n");
    for (bus, name) in [
        (Bus::Pci, "PCI"),
        (Bus::Usb, "USB"),
        (Bus::Ports, "virtio-serial"),
        (Bus::Ide, "IDE, SATA"),
        (Bus::Scsi, "SCSI"),
        (Bus::Other, "other buses"),
        (Bus::Board, "the machine"),
    ] {
        let models = tables::models().filter(|model| model.bus == bus);
        let mut names: Vec<&str> = models.flat_map(Model::names).copied().collect();
        names.sort_unstable();
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(page, "| {name} | {} |", names.join(", "));
    }
    page.push_str("\nRefused, by the beginning of the model's name:\n\n");
    page.push_str("| model | why | what to do |\n|---|---|---|\n");
    for (name, why, hint) in IMMOVABLE.iter().chain(&KEPT_HERE) {
        let _ = writeln!(page, "| `{name}` | {why} | {hint} |");
    }
}

fn settings(page: &mut String) {
    let mut names: Vec<String> = tables::settings().map(str::to_owned).collect();
    names.sort_unstable();
    let names = listed(names.into_iter());
    let _ = write!(
        page,
        "\n## Settings of the machine\n\nAn option and its key, as `-machine usb=on` is \
         `machine.usb`:\n\n{names}\n"
    );
}

/// Lists words, in lines of at most 100 columns.
fn listed(words: impl Iterator<Item = String>) -> String {
    let mut lines = vec![String::new()];
    let words: Vec<String> = words.map(|word| format!("`{word}`")).collect();
    for (at, word) in words.iter().enumerate() {
        let end = if at + 1 < words.len() { "," } else { "." };
        let line = lines.last_mut().unwrap();
        if line.is_empty() {
            *line = format!("{word}{end}");
        } else if line.len() + word.len() + 2 > 100 {
            lines.push(format!("{word}{end}"));
        } else {
            let _ = write!(line, " {word}{end}");
        }
    }
    lines.join("\n")
}

/// With `LONGHAUL_BLESS=1`, writes the page instead.
#[test]
fn the_reference_is_that_of_the_code() {
    let page = page();
    if std::env::var_os("LONGHAUL_BLESS").is_some() {
        fs::write(PAGE, &page).unwrap();
    }
    let stored = fs::read_to_string(PAGE).unwrap_or_default();
    assert!(
        stored == page,
        "docs/qemu-guests.md is not that of the code: write it with LONGHAUL_BLESS=1"
    );
}

/// What operating.md names in its table of features is known to the code.
#[test]
fn the_features_in_the_text_are_known() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md");
    let text = fs::read_to_string(path).unwrap();
    let table = text.split("| feature | result |").nth(1).unwrap();
    let table = table.split("\n\n").next().unwrap();
    let mut looked_at = 0;
    for word in table.split('`').skip(1).step_by(2) {
        let Some(option) = word
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .strip_prefix('-')
        else {
            continue;
        };
        let is_part = option.starts_with("memfd") || matches!(option, "shm" | "file");
        let known = super::options::is_known(option);
        assert!(known || is_part, "operating.md names the option -{option}");
        looked_at += 1;
    }
    assert!(looked_at > 10, "{looked_at}");
}
