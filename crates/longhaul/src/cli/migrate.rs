//! Implements `migrate` and `cancel`: starts or stops a migration and follows it until it has
//! ended.

use crate::cli::args::MigrateArgs;
use crate::cli::error::CliError;
use crate::cli::group;
use crate::cli::output::Output;
use crate::cli::show::list::short_id;
use crate::cli::show::live::{self, Mood};
use crate::cli::whole_ms;
use longhaul_api::{
    ApiError, Client, ClientError, Encoding, ErrorCode, Migration, Outcome, Phase, Progress,
    StartMigration,
};
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// The interval between two progress lines where the output cannot be redrawn in place, in
/// milliseconds.
pub(super) const PLAIN_EVERY_MS: u64 = 5_000;
/// The time limit for the report to be complete after the outcome.
pub(super) const REPORT_WAIT: Duration = Duration::from_secs(5);

/// Runs `longhaul migrate`.
pub(crate) async fn migrate(
    client: &Client,
    output: &Output,
    args: MigrateArgs,
) -> Result<u8, CliError> {
    if args.group {
        return group::migrate(client, output, args).await;
    }
    let [guest] = args.guests.as_slice() else {
        let hint = "longhaul migrate --group moves all of them";
        return Err(CliError::usage("more than one guest", hint));
    };
    let start = start(&args, guest.clone(), None);
    // From here on Ctrl-C is handled here: it must not leave an unwatched migration behind.
    let interrupts = Interrupts::new()?;
    let migration = client.migrate(&start).await?;
    if output.json {
        output.json_line(&json!({ "migration": migration }))?;
    }
    let progress = Watching::new(client, output, &migration, Mood::Watching)
        .run(interrupts)
        .await?;
    end(client, output, &migration, progress).await
}

/// Returns the request to the agent for one of the guests.
pub(super) fn start(args: &MigrateArgs, guest: String, group: Option<String>) -> StartMigration {
    StartMigration {
        guest,
        to: args.to.clone(),
        downtime_ms: whole_ms(args.wishes.downtime),
        bandwidth_bps: args.wishes.bandwidth,
        strategy: args.wishes.strategy,
        verify: args.verify,
        patience_ms: whole_ms(args.patience),
        early_release: args.wishes.early_release,
        require_arbiter: args.wishes.require_arbiter,
        keep_memory: args.wishes.keep_memory,
        encoding: Encoding {
            compression: args.encoding.compression,
            delta_cache: args.encoding.delta_cache,
            references: args.encoding.no_references.then_some(false),
            disk_references: args.encoding.no_disk_references.then_some(false),
        },
        convergence: args.wishes.ending.convergence(),
        disks: args.disks,
        bases: args.base,
        group,
    }
}

/// Runs `longhaul cancel`.
pub(crate) async fn cancel(
    client: &Client,
    output: &Output,
    migration: &str,
) -> Result<u8, CliError> {
    let id = find(client, migration).await?;
    let interrupts = Interrupts::new()?;
    let migration = client.cancel(&id).await?;
    if output.json {
        output.json_line(&json!({ "migration": migration }))?;
    }
    let progress = Watching::new(client, output, &migration, Mood::Stopping)
        .run(interrupts)
        .await?;
    let code = end(client, output, &migration, progress).await?;
    // A stopped migration is a success here; a completed one is not.
    Ok(match code {
        130 => 0,
        0 => 1,
        other => other,
    })
}

/// Returns the id of a running migration of the guest of that name; otherwise the given text, an
/// id.
pub(crate) async fn find(client: &Client, text: &str) -> Result<String, CliError> {
    let list = client.migrations().await?.migrations;
    let mut of_guest = list
        .into_iter()
        .filter(|migration| migration.guest == text && migration.outcome.is_none());
    Ok(of_guest
        .next()
        .map_or_else(|| text.to_owned(), |migration| migration.id))
}

/// Prints the outcome.
async fn end(
    client: &Client,
    output: &Output,
    migration: &Migration,
    progress: Progress,
) -> Result<u8, CliError> {
    let code = live::exit_code(&progress);
    let report = tokio::time::timeout(REPORT_WAIT, client.report(&migration.id)).await;
    let report = match report {
        Ok(Ok(report)) => Some(report),
        Ok(Err(error)) if progress.outcome == Some(Outcome::Completed) => {
            // The guest has moved; missing figures do not change that.
            output.aside(&CliError::from(error).lines());
            None
        }
        _ => None,
    };
    if output.json {
        output.json_line(&json!({ "report": report }))?;
    }
    let others = client.migrations().await.map(|list| list.migrations);
    let others = others.unwrap_or_default();
    let ids: Vec<&str> = others.iter().map(|other| other.id.as_str()).collect();
    let id = short_id(&migration.id, &ids);
    let lines = match (progress.outcome, &report) {
        (Some(Outcome::Completed), Some(report)) => {
            live::completed(migration, &progress, report, id)
        }
        (Some(Outcome::Completed), None) => vec![crate::cli::paint::Line::text(format!(
            "✓ {} runs on {}",
            migration.guest, migration.destination
        ))],
        (Some(Outcome::Aborted), _) => live::stopped(migration, &progress, id),
        (Some(Outcome::InDoubt), _) => {
            let lines = live::in_doubt(migration, &progress);
            output.aside(&lines);
            return Ok(code);
        }
        (Some(Outcome::Failed) | None, _) => {
            let reason = progress.reason.unwrap_or_else(|| {
                ApiError::new(ErrorCode::Internal, "the move ended without a reason")
            });
            return Err(CliError::api(&reason, code));
        }
    };
    if output.json {
        return Ok(code);
    }
    output.lines(&lines)?;
    Ok(code)
}

/// Ctrl-C, and the signals of a service manager.
pub(super) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    pub(super) fn new() -> Result<Self, CliError> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Returns true for a signal that leaves no time for a question.
    pub(super) async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.interrupt.recv() => false,
            _ = self.terminate.recv() => true,
        }
    }
}

/// The next event.
enum Event {
    Progress(Box<Result<Progress, ClientError>>),
    Interrupted { urgent: bool },
    Answered(bool),
}

struct Watching<'a> {
    client: &'a Client,
    output: &'a Output,
    migration: &'a Migration,
    mood: Mood,
    display: Display<'a>,
    answer: Option<oneshot::Receiver<bool>>,
}

impl<'a> Watching<'a> {
    fn new(client: &'a Client, output: &'a Output, migration: &'a Migration, mood: Mood) -> Self {
        Self {
            client,
            output,
            migration,
            mood,
            display: Display::new(output, migration),
            answer: None,
        }
    }

    /// Follows the migration until it has an outcome.
    async fn run(mut self, mut interrupts: Interrupts) -> Result<Progress, CliError> {
        let mut watch = self.client.watch(&self.migration.id).await?;
        let mut latest: Option<Progress> = None;
        loop {
            let event = tokio::select! {
                progress = watch.next() => {
                    let progress = progress.unwrap_or_else(|| Err(ClientError::Lost {
                        endpoint: "its socket".to_owned(),
                        what: "it stopped telling of the migration".to_owned(),
                    }));
                    Event::Progress(Box::new(progress))
                }
                urgent = interrupts.next() => Event::Interrupted { urgent },
                yes = answered(&mut self.answer) => Event::Answered(yes),
            };
            match event {
                Event::Progress(progress) => {
                    let progress = progress.or_else(|error| {
                        self.display.leave();
                        Err(self.lost(error))
                    })?;
                    if self.output.json {
                        self.output.json_line(&json!({ "progress": progress }))?;
                    }
                    if progress.outcome.is_some() {
                        self.display.clear();
                        return Ok(progress);
                    }
                    self.display.show(&progress, self.mood);
                    latest = Some(progress);
                }
                Event::Interrupted { urgent } => {
                    let asks = !urgent && self.display.in_place && std::io::stdin().is_terminal();
                    match self.mood {
                        Mood::Watching if asks => self.ask(latest.as_ref()),
                        Mood::Watching | Mood::Asked => self.stop(latest.as_ref()).await?,
                        Mood::Stopping => {
                            self.display.leave();
                            return Err(self.left());
                        }
                    }
                }
                Event::Answered(true) => {
                    self.display.end_question(true);
                    self.stop(latest.as_ref()).await?;
                }
                Event::Answered(false) => {
                    self.mood = Mood::Watching;
                    self.display.end_question(true);
                    self.refresh(latest.as_ref());
                }
            }
        }
    }

    fn ask(&mut self, latest: Option<&Progress>) {
        let may_still = latest.is_none_or(|progress| progress.phase < Phase::HandingOver);
        if !may_still {
            return;
        }
        self.mood = Mood::Asked;
        self.refresh(latest);
        let (sender, receiver) = oneshot::channel();
        // Reading a line cannot be cancelled: the thread ends with the command.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = std::io::stdin().read_line(&mut line).is_ok();
            let yes = read && ["y", "yes"].contains(&line.trim().to_ascii_lowercase().as_str());
            // The receiver is gone when the migration has ended meanwhile.
            let _ = sender.send(yes);
        });
        self.answer = Some(receiver);
    }

    async fn stop(&mut self, latest: Option<&Progress>) -> Result<(), CliError> {
        self.answer = None;
        self.display.end_question(false);
        match self.client.cancel(&self.migration.id).await {
            Ok(_) => self.mood = Mood::Stopping,
            // It is being handed over, or has ended: its outcome follows.
            Err(ClientError::Api(error)) if error.code == ErrorCode::TooLate => {
                self.display.leave();
                self.output.aside(&CliError::api(&error, 1).lines());
                self.mood = Mood::Watching;
            }
            Err(other) => {
                self.display.leave();
                return Err(other.into());
            }
        }
        self.refresh(latest);
        Ok(())
    }

    fn refresh(&mut self, latest: Option<&Progress>) {
        if let Some(progress) = latest {
            self.display.show(progress, self.mood);
        }
    }

    fn lost(&self, error: ClientError) -> CliError {
        let id = &self.migration.id;
        let state = format!("what became of it, once the agent runs: longhaul report {id}");
        CliError::from(error).with_state(state)
    }

    fn left(&self) -> CliError {
        let Migration { guest, id, .. } = self.migration;
        CliError::stopped(
            format!("left before the move of {guest} had stopped"),
            format!("the agent continues to stop it; see longhaul report {id}"),
        )
    }
}

async fn answered(answer: &mut Option<oneshot::Receiver<bool>>) -> bool {
    let Some(receiver) = answer else {
        return std::future::pending().await;
    };
    let yes = receiver.await.unwrap_or(false);
    *answer = None;
    yes
}

/// The display of one migration on stderr: redrawn in place on a terminal, else a line at
/// intervals.
struct Display<'a> {
    output: &'a Output,
    migration: &'a Migration,
    in_place: bool,
    /// The number of lines on the screen that belong to the display.
    lines: usize,
    /// Whether a question is pending; the display is then paused.
    asking: bool,
    said: Option<(Phase, Option<u32>, Mood, u64)>,
}

impl<'a> Display<'a> {
    fn new(output: &'a Output, migration: &'a Migration) -> Self {
        let in_place = output.err.stays_in_place() && !output.json;
        if in_place {
            // A terminal that cannot hide its cursor works too.
            let _ = output.err.term.hide_cursor();
        }
        Self {
            output,
            migration,
            in_place,
            lines: 0,
            asking: false,
            said: None,
        }
    }

    fn show(&mut self, progress: &Progress, mood: Mood) {
        if self.in_place {
            self.draw(progress, mood);
        } else if !self.output.json {
            self.say(progress, mood);
        }
    }

    fn draw(&mut self, progress: &Progress, mood: Mood) {
        if self.asking {
            return;
        }
        // The terminal writes ^C at the cursor: after the last line.
        let width = self.output.err.width().saturating_sub("^C".len() + 1);
        let frame = live::frame(self.migration, progress, mood, width);
        let mut text = self.back();
        for (index, line) in frame.iter().enumerate() {
            if index > 0 {
                text.push_str("\r\n");
            }
            text.push_str(&self.output.err.render(line, Some(width)));
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        if mood == Mood::Asked {
            // The answer is typed after the question, which ends with a space.
            text.push_str(" \x1b[?25h");
            self.asking = true;
        }
        self.lines = frame.len();
        self.write(&text);
    }

    /// Moves to the first line of the display. The cursor is in its last line.
    fn back(&self) -> String {
        match self.lines {
            0 | 1 => "\r".to_owned(),
            lines => format!("\r\x1b[{}A", lines - 1),
        }
    }

    /// Ends a question: the display is updated again. A typed answer left the cursor below it.
    fn end_question(&mut self, typed: bool) {
        if self.asking {
            self.asking = false;
            self.lines += usize::from(typed);
            self.write("\x1b[?25l");
        }
    }

    fn say(&mut self, progress: &Progress, mood: Mood) {
        let now = (progress.phase, progress.pass, mood, progress.elapsed_ms);
        let due = self.said.is_none_or(|(phase, pass, before, at_ms)| {
            (phase, pass, before) != (now.0, now.1, mood)
                || progress.elapsed_ms.saturating_sub(at_ms) >= PLAIN_EVERY_MS
        });
        if due {
            self.said = Some(now);
            self.output.aside(&[live::plain(self.migration, progress)]);
        }
    }

    /// Removes the display from the screen.
    fn clear(&mut self) {
        if self.in_place && self.lines > 0 {
            let lines = format!("{}\x1b[J", self.back());
            self.write(&lines);
            self.lines = 0;
        }
    }

    /// Leaves the display on the screen and goes on below it.
    fn leave(&mut self) {
        if self.in_place && self.lines > 0 {
            self.write("\r\n");
            self.lines = 0;
            self.asking = false;
        }
    }

    fn write(&self, text: &str) {
        let mut err = std::io::stderr().lock();
        // A terminal that is gone cannot be written to, which is no error.
        let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
    }
}

impl Drop for Display<'_> {
    fn drop(&mut self) {
        if self.in_place {
            // As above: a terminal that is gone has no cursor.
            let _ = self.output.err.term.show_cursor();
        }
    }
}
