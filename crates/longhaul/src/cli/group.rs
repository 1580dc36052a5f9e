//! Implements `migrate --group`: moves several guests to one host, a limited number at a time, and
//! prints one report of all.
//!
//! Guests that move at the same time refer to each other's content automatically, and share the
//! limit of their group. The largest go first: their content is then available to the others, and
//! none of them remains alone at the end.

use crate::cli::args::MigrateArgs;
use crate::cli::error::CliError;
use crate::cli::migrate::{Interrupts, PLAIN_EVERY_MS, REPORT_WAIT, start};
use crate::cli::output::Output;
use crate::cli::show::group::{self as show, Ended};
use crate::cli::show::live;
use longhaul_api::{ApiError, Client, ClientError, Migration, Outcome, Phase, Progress, Report};
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// The events of a move.
type Heard = (String, Result<Progress, ClientError>);

/// Runs `longhaul migrate --group`.
pub(crate) async fn migrate(
    client: &Client,
    output: &Output,
    args: MigrateArgs,
) -> Result<u8, CliError> {
    let mut interrupts = Interrupts::new()?;
    let mut group = Group {
        client,
        output,
        name: name()?,
        waiting: in_order(client, &args.guests).await?,
        args,
        began: Instant::now(),
        moving: BTreeMap::new(),
        ended: Vec::new(),
        stopping: false,
        heard: mpsc::unbounded_channel(),
        watching: JoinSet::new(),
    };
    group.begin().await?;
    while !group.moving.is_empty() {
        tokio::select! {
            heard = group.heard.1.recv() => {
                let Some((id, progress)) = heard else { break };
                group.hear(&id, progress).await?;
            }
            _ = interrupts.next() => group.stop().await,
        }
    }
    group.report()
}

/// Returns a unique name for the group.
fn name() -> Result<String, CliError> {
    let mut bytes = [0; 8];
    let random = getrandom::fill(&mut bytes);
    random.map_err(|error| CliError::failed("random", format!("no random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the guests, the largest first.
async fn in_order(client: &Client, guests: &[String]) -> Result<VecDeque<String>, CliError> {
    let known = client.guests().await?.guests;
    let memory = |name: &String| {
        let guest = known.iter().find(|guest| guest.name == *name);
        guest.and_then(|guest| guest.memory_bytes)
    };
    let mut order: Vec<String> = Vec::new();
    for guest in guests {
        if order.contains(guest) {
            let hint = "name each guest once";
            return Err(CliError::usage(format!("{guest} is named twice"), hint));
        }
        order.push(guest.clone());
    }
    order.sort_by_key(|name| Reverse(memory(name)));
    Ok(order.into())
}

struct Group<'a> {
    client: &'a Client,
    output: &'a Output,
    args: MigrateArgs,
    name: String,
    began: Instant,
    waiting: VecDeque<String>,
    /// The moves under way, by id.
    moving: BTreeMap<String, Moving>,
    ended: Vec<Ended>,
    /// After an interrupt: no further move begins.
    stopping: bool,
    heard: (mpsc::UnboundedSender<Heard>, mpsc::UnboundedReceiver<Heard>),
    watching: JoinSet<()>,
}

struct Moving {
    migration: Migration,
    said: Option<(Phase, Option<u32>, u64)>,
}

impl Group<'_> {
    /// Begins moves up to the number allowed at once.
    async fn begin(&mut self) -> Result<(), CliError> {
        while !self.stopping && self.moving.len() < usize::from(self.args.at_once) {
            let Some(guest) = self.waiting.pop_front() else {
                return Ok(());
            };
            let asked = start(&self.args, guest.clone(), Some(self.name.clone()));
            match self.client.migrate(&asked).await {
                Ok(migration) => self.watch(migration)?,
                Err(ClientError::Api(error)) => self.refused(guest, error)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn watch(&mut self, migration: Migration) -> Result<(), CliError> {
        if self.output.json {
            self.output.json_line(&json!({ "migration": migration }))?;
        }
        let (client, id, heard) = (
            self.client.clone(),
            migration.id.clone(),
            self.heard.0.clone(),
        );
        self.watching.spawn(async move {
            let mut watch = match client.watch(&id).await {
                Ok(watch) => watch,
                // The receiver is gone only when the command has ended.
                Err(error) => return drop(heard.send((id, Err(error)))),
            };
            while let Some(progress) = watch.next().await {
                let last = progress.as_ref().map_or(true, |it| it.outcome.is_some());
                if heard.send((id.clone(), progress)).is_err() || last {
                    return;
                }
            }
            let lost = ClientError::Lost {
                endpoint: "its socket".to_owned(),
                what: "it stopped telling of the migration".to_owned(),
            };
            drop(heard.send((id, Err(lost))));
        });
        let moving = Moving {
            said: None,
            migration,
        };
        self.moving.insert(moving.migration.id.clone(), moving);
        Ok(())
    }

    fn refused(&mut self, guest: String, error: ApiError) -> Result<(), CliError> {
        self.end(Ended {
            guest,
            migration: None,
            outcome: Outcome::Failed,
            exit_code: 3,
            reason: Some(error),
            report: None,
        })
    }

    async fn hear(
        &mut self,
        id: &str,
        progress: Result<Progress, ClientError>,
    ) -> Result<(), CliError> {
        let progress = progress.map_err(|error| {
            let state = "what became of each guest, once the agent runs: longhaul migrations";
            CliError::from(error).with_state(state.to_owned())
        })?;
        let Some(moving) = self.moving.get_mut(id) else {
            return Ok(());
        };
        if self.output.json {
            self.output.json_line(&json!({ "progress": progress }))?;
        }
        let Some(outcome) = progress.outcome else {
            moving.say(self.output, &progress);
            return Ok(());
        };
        let report = tokio::time::timeout(REPORT_WAIT, self.client.report(id)).await;
        let report: Option<Report> = report.ok().and_then(Result::ok);
        let Some(Moving { migration, .. }) = self.moving.remove(id) else {
            return Ok(());
        };
        self.end(Ended {
            guest: migration.guest.clone(),
            outcome,
            exit_code: live::exit_code(&progress),
            reason: progress.reason,
            report,
            migration: Some(migration),
        })?;
        self.begin().await
    }

    fn end(&mut self, ended: Ended) -> Result<(), CliError> {
        if !self.output.json {
            self.output.aside(&[show::ended(&ended)]);
        }
        self.ended.push(ended);
        Ok(())
    }

    /// Begins no further moves, and stops those that can still be stopped.
    async fn stop(&mut self) {
        self.stopping = true;
        for id in self.moving.keys() {
            if let Err(error) = self.client.cancel(id).await {
                // It is being handed over, or has ended: its outcome follows.
                self.output.aside(&CliError::from(error).lines());
            }
        }
    }

    /// Prints one report of all moves.
    fn report(self) -> Result<u8, CliError> {
        let summary = show::Summary {
            name: self.name,
            to: self.args.to,
            total_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            ended: self.ended,
            not_begun: self.waiting.into(),
        };
        if self.output.json {
            self.output.json_line(&json!({ "group": summary.json() }))?;
        } else {
            self.output.lines(&show::summary(&summary))?;
        }
        Ok(summary.exit_code())
    }
}

impl Moving {
    fn say(&mut self, output: &Output, progress: &Progress) {
        let due = self.said.is_none_or(|(phase, pass, at_ms)| {
            (phase, pass) != (progress.phase, progress.pass)
                || progress.elapsed_ms.saturating_sub(at_ms) >= PLAIN_EVERY_MS
        });
        if due && !output.json {
            self.said = Some((progress.phase, progress.pass, progress.elapsed_ms));
            output.aside(&[show::under_way(&self.migration, progress)]);
        }
    }
}
