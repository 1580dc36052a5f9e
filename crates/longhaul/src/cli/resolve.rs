//! Implements `resolve`: an operator ends a doubt, after a warning about the consequences.

use crate::cli::args::{ResolveArgs, RunOn};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone};
use crate::cli::{now_unix_ms, show};
use longhaul_api::{Client, Migration, OtherSide, Outcome, Resolve, Side};
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
    let other_side = args.other_side.map(|other| match other {
        crate::cli::args::OtherSide::Dead => OtherSide::Dead,
        crate::cli::args::OtherSide::Fenced => OtherSide::Fenced,
    });
    let request = Resolve {
        run_on,
        other_side,
        because: args.because,
    };
    let way = migration.doubt.as_ref().and_then(|doubt| {
        let mut ways = doubt.ways_out.iter();
        let way = ways.find(|way| way.run_on == run_on)?;
        // A request that the agent will refuse anyway needs no question.
        (other_side.is_some() || !way.needs_other_side).then_some((doubt, way))
    });
    if let Some((doubt, way)) = way {
        let width = output.err.width();
        let now = now_unix_ms();
        output.aside(&show::doubt::stakes(
            &migration, doubt, way, other_side, now, width,
        ));
        if !args.yes {
            confirm(&migration, run_on)?;
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
    if !output.json {
        output.lines(&[end(&done, run_on)])?;
    }
    Ok(0)
}

/// Returns the migration in doubt of the guest of that name, or its newest, for which the agent
/// reports more; otherwise the given text, an id.
async fn find(client: &Client, text: &str) -> Result<String, CliError> {
    let mut list = client.migrations().await?.migrations;
    list.retain(|migration| migration.guest == text);
    let in_doubt = list.iter().find(|migration| migration.doubt.is_some());
    let found = in_doubt.or(list.first());
    Ok(found.map_or_else(|| text.to_owned(), |migration| migration.id.clone()))
}

fn confirm(migration: &Migration, run_on: Side) -> Result<(), CliError> {
    let host = show::doubt::host(migration, run_on);
    if !std::io::stdin().is_terminal() {
        return Err(CliError::usage(
            "nobody can be asked here whether that is so",
            "read what is at stake, and add --yes",
        ));
    }
    let mut err = std::io::stderr().lock();
    write!(
        err,
        "Type {host} to go on, anything else to leave it as it is: "
    )?;
    err.flush()?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    if line.trim() == host {
        return Ok(());
    }
    Err(CliError::stopped(
        "nothing was changed",
        format!("{} is in doubt as before", migration.guest),
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
        .plain(format!("not in doubt any more: {state}"))
}
