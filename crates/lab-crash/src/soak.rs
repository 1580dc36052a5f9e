//! Implements `lab soak`: one guest moves back and forth, with failures in between, without leaving
//! remains.

use super::case::{Back, Case, Pair, Site, universe_of};
use super::cover::Random;
use super::ground::{Ground, LIMIT};
use super::predict::{Place, places};
use super::{attempt, points, seed_or_date};
use longhaul_lab::error::LabError;
use longhaul_lab::guest::disks::Format;
use longhaul_lab::installed::QEMU_VERSIONS;
use longhaul_lab::interrupt;
use longhaul_lab::lab::say;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::Finished;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The percentage of undisturbed moves.
const UNDISTURBED: usize = 60;
/// The interval of progress lines, in moves.
const SAY_EVERY: u32 = 10;

/// The options of `lab soak`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The number of moves
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub moves: u32,
    /// The seed of the failures [default: the date]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// QEMU on both hosts
    #[arg(long, default_value = "10.0", value_parser = QEMU_VERSIONS)]
    pub qemu: String,
}

/// The results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Undisturbed moves.
    pub undisturbed: u32,
    /// Moves in which something failed.
    pub disturbed: u32,
    /// The number of changes of host.
    pub arrived: u32,
    /// The failure that ended it.
    pub failure: Option<String>,
}

/// Runs the command: exit status 0 when nothing is wrong and there are no remains, else 1.
///
/// # Errors
/// When it cannot be run, or is interrupted.
pub fn command(options: &Options) -> Result<ExitCode, LabError> {
    let summary = run(options)?;
    Ok(ExitCode::from(u8::from(summary.failure.is_some())))
}

/// Moves the guest, and checks the remains.
///
/// # Errors
/// When hosts or guest cannot be made, or it is interrupted.
pub fn run(options: &Options) -> Result<Summary, LabError> {
    let (began, seed) = (Instant::now(), seed_or_date(options.seed));
    let pair = match options.qemu.as_str() {
        "7.2" => Pair::Old,
        "11.1" => Pair::Newest,
        _ => Pair::New,
    };
    // Without locks, as they could hide a second copy.
    let site = Site {
        pair,
        locks: false,
        own: Some(Format::Raw),
    };
    let cases: Vec<Case> = universe_of(&points()?, &[pair])
        .into_iter()
        .filter(|case| case.kind.site() == site && survives(case))
        .collect();
    say(&format!(
        "soak: {} moves of one guest with QEMU {}, seed {seed}",
        options.moves, options.qemu
    ));
    let mut ground = Ground::make(site, seed)?;
    let mut random = Random::new(seed);
    let mut summary = Summary::default();
    for number in 1..=options.moves {
        interrupt::check()?;
        let before = ground.at;
        let failure = if random.below(100) < UNDISTURBED {
            summary.undisturbed += 1;
            undisturbed(&mut ground)?
        } else {
            summary.disturbed += 1;
            let case = &cases[random.below(cases.len())];
            let which = (number as usize, options.moves as usize);
            attempt(&mut ground, case, which, false)?.map(|failed| failed.why)
        };
        summary.arrived += u32::from(ground.at != before);
        if let Some(failure) = failure {
            summary.failure = Some(format!("move {number}: {failure}"));
            break;
        }
        if number % SAY_EVERY == 0 {
            let seconds = began.elapsed().as_secs();
            say(&format!("{number:>4} moves, {seconds} s"));
        }
    }
    if summary.failure.is_none() {
        summary.failure = nothing_is_left(&ground)?;
    }
    say(&format!(
        "soak: {} moves left alone, {} disturbed, {} arrivals, {} s: {}",
        summary.undisturbed,
        summary.disturbed,
        summary.arrived,
        began.elapsed().as_secs(),
        summary
            .failure
            .as_deref()
            .unwrap_or("no error, nothing left over")
    ));
    Ok(summary)
}

/// Returns whether the guest certainly survives a case.
fn survives(case: &Case) -> bool {
    case.kind.victim.qemu().is_none()
        && case.kind.back == Back::AtOnce
        && !places(case).allow(Place::Nowhere)
}

/// Runs a move that must complete; returns the failure.
fn undisturbed(ground: &mut Ground) -> Result<Option<String>, LabError> {
    let before = ground.arena.origins();
    ground.arena.forget_beats();
    let to = ground.lab.host(1 - ground.at)?;
    let moving = ground.product.migrate(ground.at, &ground.guest, to, &[])?;
    let finished: Finished = moving.finish(LIMIT)?;
    if !finished.completed() {
        return Ok(Some(format!("an undisturbed move: {}", finished.why())));
    }
    ground.at = 1 - ground.at;
    if let Err(fault) = ground.verify(&before) {
        return Ok(Some(fault));
    }
    let left = left_over(ground, Some(ground.at));
    Ok(left.or_else(|| ground.judge_disk(Some(ground.at)).err()))
}

fn left_over(ground: &Ground, owner: Option<usize>) -> Option<String> {
    let mut left = None;
    wait_until(LIMIT, || {
        let look = ground.left_over(owner);
        left = look.unwrap_or_else(|error| Some(error.to_string()));
        left.is_none()
    });
    left.map(|left| format!("left over: {left}"))
}

/// Ends the guest, and checks for remains that a year of moves would accumulate.
fn nothing_is_left(ground: &Ground) -> Result<Option<String>, LabError> {
    ground.end()?;
    if let Some(left) = left_over(ground, None) {
        return Ok(Some(left));
    }
    let mut left = None;
    let limit = Duration::from_secs(30);
    wait_until(limit, || {
        let look = ground.remains();
        left = look.unwrap_or_else(|error| Some(error.to_string()));
        left.is_none()
    });
    Ok(left)
}
