//! Implements `resolve` and `guests reclaim`: an operator decides for a host that never comes back,
//! after a warning about the consequences.

use crate::cli::args::{self, ReclaimArgs, ResolveArgs, RunOn};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone};
use crate::cli::{now_unix_ms, show};
use longhaul_api::{
    Client, ClientError, ErrorCode, GuestState, Migration, OtherSide, Outcome, ReclaimGuest,
    Resolve, Side,
};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// The time limit for the agent to act.
const DONE_WITHIN: Duration = Duration::from_secs(60);
/// The polling interval.
const ASK_EVERY: Duration = Duration::from_millis(250);

/// Runs `longhaul resolve`.
pub(crate) async fn resolve(
    client: &Client,
    output: &Output,
    args: ResolveArgs,
) -> Result<u8, CliError> {
    let id = find(client, &args.migration).await?;
    let migration = client.migration(&id).await?;
    let run_on = match args.run_on {
        RunOn::Source => Side::Source,
        RunOn::Destination => Side::Destination,
    };
    let other_side = args.other_side.map(said);
    let request = Resolve {
        run_on,
        other_side,
        give_up_missing: args.give_up_missing,
        because: args.because,
    };
    let way = migration.doubt.as_ref().and_then(|doubt| {
        let mut ways = doubt.ways_out.iter();
        let way = ways.find(|way| way.run_on == run_on)?;
        // A request that the agent will refuse anyway needs no question.
        let complete = (other_side.is_some() || !way.needs_other_side)
            && args.give_up_missing == way.gives_up_missing;
        complete.then_some((doubt, way))
    });
    if let Some((doubt, way)) = way {
        let width = output.err.width();
        let now = now_unix_ms();
        output.aside(&show::doubt::stakes(
            &migration, doubt, way, other_side, now, width,
        ));
        if !args.yes {
            let host = show::doubt::host(&migration, run_on);
            confirm(host, &migration.guest)?;
        }
    }
    client.resolve(&migration.id, &request).await?;
    let done = wait(client, &migration.id).await?;
    if output.json {
        output.document(&done)?;
    }
    if done.doubt.is_some() {
        output.aside(&[Line::default().tone(Tone::Bad, "in doubt").plain(format!(
            ": the agent is still at it; see longhaul migrations, and its log ({})",
            done.id
        ))]);
        return Ok(4);
    }
    if done.outcome.is_none() {
        output.aside(&[Line::text(format!(
            "nothing was changed yet: the agents may be connected again; see longhaul migrations \
             ({})",
            done.id
        ))]);
        return Ok(4);
    }
    if !output.json {
        output.lines(&[end(&done, run_on)])?;
    }
    Ok(0)
}

/// Returns the migration of the guest of that name, or its newest, for which the agent
/// reports more; otherwise the given text, an id.
async fn find(client: &Client, text: &str) -> Result<String, CliError> {
    let mut list = client.migrations().await?.migrations;
    list.retain(|migration| migration.guest == text);
    let in_doubt = list.iter().find(|migration| migration.doubt.is_some());
    let found = in_doubt.or(list.first());
    Ok(found.map_or_else(|| text.to_owned(), |migration| migration.id.clone()))
}

/// Runs `longhaul guests reclaim`.
pub(crate) async fn reclaim(
    client: &Client,
    output: &Output,
    args: ReclaimArgs,
) -> Result<(), CliError> {
    let name = &args.name;
    let there = match client.guest(name).await {
        Ok(guest) if guest.state == GuestState::Elsewhere => guest.state_detail,
        Ok(_) => None,
        // One that came here and moved on left no description.
        Err(ClientError::Api(error)) if error.code == ErrorCode::GuestUnknown => None,
        Err(error) => return Err(error.into()),
    };
    let there = there.unwrap_or_else(|| "elsewhere".to_owned());
    let other_side = said(args.other_side);
    let state = other_side.name();
    output.aside(&[
        Line::text("You say: ").tone(
            Tone::Strong,
            format!("the host of {name} ({there}) is {state}, and never runs it again."),
        ),
        Line::text(format!(
            "{name} belongs to this host from now on, and is not started. Its memory is lost, and \
             what it did {there} on disks that are not shared."
        )),
        Line::text(
            "If it moved on from there to a third host, or that host comes back, two copies may \
             run: their file systems would be damaged.",
        ),
    ]);
    if !args.yes {
        confirm(name, name)?;
    }
    let request = ReclaimGuest {
        other_side,
        because: args.because,
    };
    let guest = client.reclaim_guest(&args.name, &request).await?;
    if output.json {
        output.document(&guest)?;
        return Ok(());
    }
    let generation = guest.generation.unwrap_or_default();
    output.lines(&[Line::default().tone(Tone::Good, "✓ ").plain(format!(
        "{} belongs to this host (generation {generation}); to start it: longhaul guests start {}",
        guest.name, guest.name
    ))])?;
    Ok(())
}

pub(crate) fn said(other: args::OtherSide) -> OtherSide {
    match other {
        args::OtherSide::Dead => OtherSide::Dead,
        args::OtherSide::Fenced => OtherSide::Fenced,
    }
}

/// Asks for a word that nobody types by accident.
pub(crate) fn confirm(word: &str, guest: &str) -> Result<(), CliError> {
    if !std::io::stdin().is_terminal() {
        return Err(CliError::usage(
            "this agent cannot verify that",
            "read what is at stake, and add --yes",
        ));
    }
    let mut err = std::io::stderr().lock();
    write!(
        err,
        "Type {word} to go on, anything else to leave it as it is: "
    )?;
    err.flush()?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    if line.trim() == word {
        return Ok(());
    }
    Err(CliError::stopped(
        "nothing was changed",
        format!("{guest} is as before"),
    ))
}

/// Waits until the agent has acted.
async fn wait(client: &Client, id: &str) -> Result<Migration, CliError> {
    let until = tokio::time::Instant::now() + DONE_WITHIN;
    loop {
        let migration = client.migration(id).await?;
        let ended = migration.outcome.is_some_and(|how| how != Outcome::InDoubt);
        if (migration.doubt.is_none() && ended) || tokio::time::Instant::now() > until {
            return Ok(migration);
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

fn end(migration: &Migration, run_on: Side) -> Line {
    let reason = migration.reason.as_ref();
    let state = reason.and_then(|reason| reason.state_of_guest.clone());
    let host = show::doubt::host(migration, run_on);
    let state = state.unwrap_or_else(|| format!("{} belongs to {host}", migration.guest));
    Line::default()
        .tone(Tone::Good, "✓ ")
        .plain(format!("decided: {state}"))
}
