//! Formats base images.

use super::figure::{self, bar, part_of, percent};
use crate::cli::image::{
    FetchDocument, ImportDocument, ListDocument, Listed, RemoveDocument, VerifyDocument,
};
use crate::cli::paint::{Line, Tone, head, table};
use longhaul_image::ImportProgress;
use longhaul_protocol::units::show_bytes;

/// The number of digits of a displayed id.
const SHORT_DIGITS: usize = 12;
/// The width of the figures beside a bar.
const FIGURES: usize = 58;

pub(super) fn short(id: &str) -> &str {
    id.get(..SHORT_DIGITS).unwrap_or(id)
}

pub(super) fn under_way(what: String, done: u64, all: u64, figures: String, width: usize) -> Line {
    let columns = width.saturating_sub(what.len() + FIGURES).clamp(10, 40);
    let (full, rest) = bar(done, all, columns);
    Line::text(what)
        .plain("  ")
        .tone(Tone::Good, full)
        .tone(Tone::Faint, rest)
        .plain(format!("  {:>3} %   {figures}", percent(done, all)))
}

/// Formats the progress of an import.
pub(crate) fn importing(called: &str, progress: &ImportProgress, width: usize) -> Line {
    if progress.waits {
        return Line::text(format!("importing {called}  waits for a removal to end"));
    }
    let (done, all) = (progress.read_bytes, progress.total_bytes);
    let figures = format!(
        "{} · {} stored",
        part_of(done, all),
        show_bytes(progress.stored_bytes)
    );
    under_way(format!("importing {called}"), done, all, figures, width)
}

/// Formats the progress of a fetch.
pub(crate) fn fetching(called: &str, here: u64, all: u64, width: usize) -> Line {
    let figures = part_of(here, all);
    under_way(format!("fetching {called}"), here, all, figures, width)
}

/// Formats a fetched image.
pub(crate) fn fetched(called: &str, image: &FetchDocument) -> Vec<Line> {
    let what = match image.read_bytes {
        0 => "it was here already".to_owned(),
        bytes => format!("{} read", show_bytes(bytes)),
    };
    let (id, size) = (short(&image.id), show_bytes(image.size_bytes));
    let called = match id.starts_with(called) || image.id.starts_with(called) {
        true => format!("image {id}"),
        false => format!("{called} is image {id}"),
    };
    let mut lines = super::super::done(format!("{called} · {size} · {what}"));
    lines.push(Line::text(format!("  {}", image.path.display())));
    lines
}

/// Formats the progress of a verification.
pub(crate) fn verifying(called: &str, done: u64, all: u64, width: usize) -> Line {
    let figures = format!("{done} of {all} stripes");
    under_way(format!("verifying {called}"), done, all, figures, width)
}

/// Formats an imported image.
pub(crate) fn imported(image: &ImportDocument) -> Vec<Line> {
    let id = short(&image.id);
    let called = match &image.name {
        Some(name) => format!("{name} is image {id}"),
        None => format!("image {id}"),
    };
    let content = match image.content_bytes {
        0 => "all of it zeros".to_owned(),
        bytes => format!("{} of it not zeros", show_bytes(bytes)),
    };
    let stored = match image.new_bytes {
        0 => "everything was there already".to_owned(),
        new if new == image.content_bytes => format!("{} stored", show_bytes(image.stored_bytes)),
        new => format!(
            "{} stored, {} were there already",
            show_bytes(image.stored_bytes),
            show_bytes(image.content_bytes.saturating_sub(new))
        ),
    };
    let size = show_bytes(image.size_bytes);
    super::super::done(format!("{called} · {size}, {content} · {stored}"))
}

/// Formats the images of a repository.
pub(crate) fn list(document: &ListDocument) -> Vec<Line> {
    if document.images.is_empty() {
        return vec![
            Line::text(format!(
                "no images in {}; to import one: ",
                document.repository
            ))
            .tone(Tone::Strong, "longhaul image import FILE"),
        ];
    }
    let mut rows = vec![head(&["name", "image", "size", "not zeros"])];
    rows.extend(document.images.iter().map(row));
    table(rows)
}

fn row(image: &Listed) -> Vec<Line> {
    let names = match image.names[..] {
        [] => figure::UNKNOWN.to_owned(),
        _ => image.names.join(", "),
    };
    let last = match &image.damage {
        Some(damage) => Line::default().tone(Tone::Bad, format!("damaged: {damage}")),
        None => Line::text(figure::bytes(image.content_bytes)),
    };
    vec![
        Line::default().tone(Tone::Strong, names),
        Line::text(short(&image.id)),
        Line::text(figure::bytes(image.size_bytes)),
        last,
    ]
}

/// Formats the results of a verification.
pub(crate) fn verified(document: &VerifyDocument) -> Vec<Line> {
    let mut lines = Vec::new();
    for image in &document.images {
        let called = &image.called;
        if image.good {
            let all = format!(
                "{called}: all {} stripes are as they should be",
                image.stripes
            );
            lines.extend(super::super::done(all));
            continue;
        }
        let first = image.first_bad_offset.unwrap_or(0);
        lines.push(Line::default().tone(Tone::Bad, "✗ ").plain(format!(
            "{called}: of {} stripes {} are damaged and {} missing, the first at {}",
            image.stripes,
            image.damaged,
            image.missing,
            show_bytes(first)
        )));
        lines.push(Line::text(
            "  to fix it: longhaul image import --rewrite FILE, with the disk that it was made of",
        ));
    }
    if lines.is_empty() {
        lines.push(Line::text("no images"));
    }
    lines
}

/// Formats removed images.
pub(crate) fn removed(called: &[String], document: &RemoveDocument) -> Vec<Line> {
    let freed = match document.freed_bytes {
        0 => "all of their content is in other images".to_owned(),
        bytes => format!("{} of content are gone with them", show_bytes(bytes)),
    };
    super::super::done(format!("removed: {} · {freed}", called.join(", ")))
}
