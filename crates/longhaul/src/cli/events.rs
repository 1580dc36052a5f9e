//! Implements `events`: follows the moves and reserved guests of a host until it is interrupted.

use crate::cli::error::CliError;
use crate::cli::migrate::Interrupts;
use crate::cli::output::Output;
use crate::cli::paint::Line;
use crate::cli::show;
use longhaul_api::{Client, What};

/// Runs `longhaul events`.
pub(crate) async fn follow(client: &Client, output: &Output) -> Result<u8, CliError> {
    let mut interrupts = Interrupts::new()?;
    let mut events = client.events().await?;
    // Whether the present state is complete, and whether it has anything.
    let (mut is_complete, mut is_empty) = (false, true);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = interrupts.next() => return Ok(130),
        };
        let Some(event) = event.transpose()? else {
            return Ok(0);
        };
        match &event.what {
            What::Current {} if is_complete => continue,
            What::Current {} => {
                is_complete = true;
                if is_empty && !output.json {
                    output.aside(&[Line::text("no guest moves from or to this host now")]);
                }
            }
            What::Snapshot { .. } => (is_complete, is_empty) = (false, true),
            _ => is_empty = false,
        }
        if output.json {
            output.json_line(&event)?;
        } else {
            output.lines(show::events::line(&event).as_slice())?;
        }
    }
}
