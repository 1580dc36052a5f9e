//! Explores the handover and prints the results; fails when a property is violated, or when a
//! deliberately broken variant is not caught.

use longhaul_model::explore::{Found, explore};
use longhaul_model::outcome::{Outcome, Outcomes};
use longhaul_model::plan::{self, Configuration};
use longhaul_model::{Left, Property, Variant};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The state limit: more would exceed the memory of a small machine.
const STATES_MAX: usize = 60_000_000;
/// The number of threads: as many as `make test` may count on.
const THREADS: usize = 2;
const HELP: &str = "\
model - explores the handover, with the functions that the agents run

usage: model [--deep]

  --deep   with wider bounds: some minutes, and some gigabytes of memory";

fn main() -> ExitCode {
    let mut configurations = plan::usual();
    for argument in std::env::args().skip(1) {
        match &argument[..] {
            "--deep" => configurations.extend(plan::deep()),
            "--help" | "-h" => return say(HELP).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS),
            other => {
                let text = format!("model: what is {other}?\n\n{HELP}");
                return say(&text).map_or(ExitCode::FAILURE, |()| ExitCode::from(2));
            }
        }
    }
    match run(&configurations) {
        Ok(true) => ExitCode::SUCCESS,
        // The reader is gone: no one to report to.
        Ok(false) | Err(_) => ExitCode::FAILURE,
    }
}

fn say(text: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// Explores all of them, and passes each result on in order.
fn explore_all(
    configurations: &[Configuration],
    mut each: impl FnMut(&Configuration, &Found) -> io::Result<()>,
) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let found: Vec<Mutex<Option<Found>>> =
        configurations.iter().map(|_| Mutex::default()).collect();
    let work = || {
        while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed))
            && let (Some(configuration), Some(place)) =
                (configurations.get(number), found.get(number))
        {
            let result = explore(configuration.setting, configuration.budget, STATES_MAX);
            *place.lock().unwrap_or_else(|broken| broken.into_inner()) = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(work);
        }
    });
    for (configuration, place) in configurations.iter().zip(found) {
        let result = place.into_inner();
        if let Some(result) = result.unwrap_or_else(|broken| broken.into_inner()) {
            each(configuration, &result)?;
        }
    }
    Ok(())
}

fn run(configurations: &[Configuration]) -> io::Result<bool> {
    let began = Instant::now();
    let mut states = 0;
    let mut seen = Outcomes::default();
    let mut failures = Vec::new();
    explore_all(configurations, |configuration, found| {
        states += found.states;
        seen.join(found.seen);
        let verdict = match &found.failure {
            Some(failure) => format!("BROKEN: {}", failure.property.name()),
            None if found.cut_short => "too many states".to_owned(),
            None => format!("{} properties hold", Property::ALL.len()),
        };
        say(&format!(
            "model {}: {} unique states, {verdict} (depth {}, {:.1} s)",
            describe(configuration),
            found.states,
            found.depth,
            found.time.as_secs_f64()
        ))?;
        if found.failure.is_some() || found.cut_short {
            failures.push(found.failure.clone());
        }
        Ok(())
    })?;
    say(&format!("model: {states} unique states in all\n"))?;
    let mut good = failures.is_empty();
    for property in Property::ALL {
        let broken = failures
            .iter()
            .flatten()
            .any(|failure| failure.property == property);
        let verdict = if broken { "BROKEN" } else { "OK" };
        say(&format!("{verdict:<7} {}", property.name()))?;
    }
    for failure in failures.iter().flatten() {
        let trace = failure.trace.join("\n");
        say(&format!("\n{}:\n{trace}", failure.property.name()))?;
    }
    say("")?;
    for outcome in Outcome::ALL {
        let verdict = if seen.has(outcome) { "seen" } else { "NEVER" };
        good &= seen.has(outcome);
        say(&format!("{verdict:<7} {}", outcome.name()))?;
    }
    good &= let_loose()?;
    let verdict = if good { "holds" } else { "DOES NOT HOLD" };
    let seconds = began.elapsed().as_secs_f64();
    say(&format!("\nthe handover {verdict} ({seconds:.0} s)"))?;
    Ok(good)
}

/// Runs the broken variants; returns whether all were caught.
fn let_loose() -> io::Result<bool> {
    say("")?;
    let configurations = Variant::BROKEN.map(plan::for_variant);
    let mut all = true;
    explore_all(&configurations, |configuration, found| {
        let name = configuration.setting.variant.name();
        all &= found.failure.is_some();
        let caught = match &found.failure {
            Some(failure) => {
                let (property, length) = (failure.property.name(), failure.length);
                format!("caught ({property}, after {length} steps)")
            }
            None => format!("NOT CAUGHT in {} states", found.states),
        };
        say(&format!("broken variant {name}: {caught}"))
    })?;
    Ok(all)
}

/// Returns a description of the setting and its budget.
fn describe(configuration: &Configuration) -> String {
    let (setting, budget) = (&configuration.setting, &configuration.budget);
    let release = if setting.early { "early" } else { "late" };
    let guest = if setting.paused { "paused" } else { "running" };
    let order = if setting.orderly {
        "in order"
    } else {
        "in any order"
    };
    let arbiter = if setting.arbiter {
        ", with an arbiter"
    } else {
        ""
    };
    let memory = match setting.left {
        Left::Memory { keeps: false } => ", memory follows",
        Left::Memory { keeps: true } => ", memory follows and is copied to a file",
        Left::Nothing | Left::Disks => "",
    };
    let [a, b] = budget.crashes;
    let mut text = format!(
        "{release} release, {guest} guest, moves {}, messages on the way {} {order}{arbiter}\
         {memory}",
        setting.attempts, setting.messages,
    );
    let troubles = [
        ("crashes at A", a),
        ("crashes at B", b),
        ("failed writes", budget.failed_writes),
        ("messages twice", budget.duplicates),
        ("surprises of QEMU", budget.surprises),
        ("lost hosts", budget.lost_hosts),
        ("starts by a person", budget.boots),
        ("lost journals", budget.lost_journals),
        ("hosts that never return", budget.buried),
        ("replaced hosts", budget.replaced),
        ("killed page servers", budget.servers),
    ];
    for (what, times) in troubles.into_iter().filter(|(_, times)| *times > 0) {
        let _ = write!(text, ", {what} {times}");
    }
    text
}
